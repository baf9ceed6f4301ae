"""Runs -> one plain structure that every output is written from."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from launcher.compare.report import analysis
from launcher.compare.report.columns import COLUMNS, printable
from launcher.compare.report.find import telling_tails
from launcher.compare.report.goals import best_by_goal
from launcher.compare.report.runs import Run
from launcher.strategies import VARIANTS
from launcher.util.sizes import GIB

REPORT_VERSION = 1
# The moments that tell most about a rank, before any other.
_MOMENTS = ("oom", "peak")
# Not what a comparison is about, or shown in a column of its own.
_NOT_A_SETTING = {
    *("out", "log_every", "report_to", "log_level", "collective_timeout_s"),
    *("max_minutes", "eval_every", "sample_every_s", "memory_trace", "device"),
    *("resume", "save_every", "test_batches", "micro_batch", "global_batch"),
    "sample_every",
    *("precision", "replicate", *(name for v in VARIANTS.values() for name in v.fields)),
}
_UNSAID = (None, False, "none", "auto")  # a setting that is off goes without saying
_QUARTILES = ("tokens_per_s_p25", "tokens_per_s_median", "tokens_per_s_p75")
_OF_RECORD = (
    *("strategy", "strategy_also_called", "precision", "world_size", "micro_batch"),
    *("accumulation", "global_batch", "seq_len", "context_parallel", "tensor_parallel"),
    *("model", "parameters", "device_name"),
)


class Report:
    """The comparison: `data` is what JSON output holds; runs and curves are for the charts."""

    def __init__(
        self,
        runs: Sequence[Run],
        *,
        reference: str | None = None,
        memory_budget_bytes: int = 24 * GIB,
    ) -> None:
        self.figures = {run.name: analysis.figures(run) for run in runs}
        self.references = analysis.choose_references(runs, reference)
        self.differences = {
            run.name: analysis.loss_difference(run, self.references.get(run.name)) for run in runs
        }
        # A run that says nothing about itself (a cell that never started) competes with nobody.
        settings = {r.name: analysis.setting(r) if r.record.get("model") else None for r in runs}
        order = [*dict.fromkeys(setting for setting in settings.values() if setting), None]
        self.runs = sorted(
            runs,
            key=lambda run: (
                order.index(settings[run.name]),
                not run.completed,
                -(self.figures[run.name].tokens_per_s or 0),
            ),
        )
        self._groups = {
            setting: [run for run in self.runs if settings[run.name] == setting]
            for setting in order
        }
        self.data = clean(self._data(memory_budget_bytes))

    def _data(self, budget_bytes: int) -> dict[str, Any]:
        differs = differing(self.runs)
        rows = []
        for setting, group in self._groups.items():
            fronts = {
                kind: analysis.pareto(analysis.pareto_points(group, self.figures, kind))
                for kind in analysis.MEMORY_KINDS
                if setting
            }
            for position, run in enumerate(group, start=1):
                row = self._row(run, position if setting and run.completed else None)
                row["setting"] = setting
                row |= differs[run.name]
                row["pareto"] = [kind for kind, names in fronts.items() if run.name in names]
                rows.append(row)
        keys = [c.key for c in COLUMNS if c.always or any(r[c.key] is not None for r in rows)]
        compared = {setting: group for setting, group in self._groups.items() if setting}
        if len(compared) == 1:
            keys.remove("setting")
        return {
            "report_version": REPORT_VERSION,
            "made_unix_s": time.time(),
            "columns": keys,
            "settings": [
                {"setting": setting, "goals": best_by_goal(group, self.figures, budget_bytes)}
                for setting, group in compared.items()
            ],
            "runs": rows,
            "environments": environments(self.runs),
        }

    def _row(self, run: Run, position: int | None) -> dict[str, Any]:
        record, steps = run.record, run.steps
        known = dataclasses.asdict(self.figures[run.name])
        difference = self.differences.get(run.name)
        return {
            "position": position,
            "run": run.name,
            "path": None if run.path is None else str(run.path),
            **{name: record.get(name) for name in _OF_RECORD},
            "state": run.state,
            **known.pop("memory"),
            **known,
            **dict(zip(_QUARTILES, (steps and steps.rate_quartiles) or (None,) * 3, strict=True)),
            "steady_steps": steps.steady_steps if steps else None,
            "loss_difference": difference.largest if difference else None,
            "loss_difference_step": difference.at_step if difference else None,
            "reference": difference.reference if difference else None,
            "loss_note": self._loss_note(run),
            "steps": len(steps.step) if steps else None if run.path is None else 0,
            "first_step_s": steps.first_step_s if steps else None,
            "duration_s": run.summary.duration_s,
            "where": _where(run),
            "reason": run.reason,
            "phases_s": dict(steps.phases_s) if steps and steps.phases_s else None,
            "peaks_by_phase": [{"rank": rank, **record} for rank, record in run.phases],
            "ledgers": _ledgers(run),
            "notes": list(run.notes),
        }

    def _loss_note(self, run: Run) -> str | None:
        """Why the losses of this run are held against nothing, or what to know about it."""
        reference, difference = self.references.get(run.name), self.differences.get(run.name)
        if run.steps is None:
            return "no step was finished"
        if reference is None:
            return "no single or ddp run to hold it against (--reference NAME chooses one)"
        if run is reference:
            return "reference"
        if difference is None:
            names = analysis.differing_settings(run, reference)
            return f"differs from {reference.name} in {', '.join(names) or 'its steps'}"
        if difference.not_finite:
            return f"at {difference.not_finite} step(s) only one of the two losses is a number"
        return None


def differing(runs: Sequence[Run]) -> dict[str, dict[str, str | None]]:
    """For each run the settings in which not all runs agree, as `lr 0.001, window 64`.

    `differs` has them as they are, `differs_brief` has paths cut down to what tells them apart.
    """
    known = [run for run in runs if run.config]
    keys = dict.fromkeys(key for run in known for key in run.config if key not in _NOT_A_SETTING)
    told: dict[str, list[tuple[str, str]]] = {run.name: [] for run in runs}
    for key in keys:
        values = {run.name: run.config.get(key) for run in known}
        if len(set(map(str, values.values()))) == 1:
            continue
        paths = {Path(value) for value in values.values() if _is_path(value)}
        tails = telling_tails(paths)
        for name, value in values.items():
            if value not in _UNSAID:
                brief = tails[Path(value)] if _is_path(value) else value
                told[name].append((f"{key} {value}", f"{key} {brief}"))
    return {
        name: {
            "differs": ", ".join(whole for whole, _ in parts) or None,
            "differs_brief": ", ".join(brief for _, brief in parts) or None,
        }
        for name, parts in told.items()
    }


def _is_path(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and "/" in value and not value.startswith("hf:")


def environments(runs: Sequence[Run]) -> list[str]:
    """What the runs were made with, each combination once."""
    told = []
    for run in runs:
        known, packages = run.environment, run.environment.get("packages", {})
        versions = {name: packages.get(name) for name in ("torch", "deepspeed")}
        versions |= {"Python": known.get("python"), "revision": known.get("git")}
        told.append(", ".join(f"{name} {one}" for name, one in versions.items() if one))
    return list(dict.fromkeys(filter(None, told)))


def _where(run: Run) -> str | None:
    if run.completed or run.phase is None:
        return None
    return run.phase if run.failed_rank is None else f"{run.phase}, rank {run.failed_rank}"


def _ledgers(run: Run) -> list[dict[str, Any]]:
    """For each rank its most telling ledger, and the predicted one, one entry per place."""
    chosen: dict[tuple[int, bool], Mapping[str, Any]] = {}
    for rank, ledger in run.ledgers:
        key = (rank, ledger.get("moment") == "predicted")
        before = chosen.get(key)
        if before is None or _worth(ledger) >= _worth(before):
            chosen[key] = ledger
    entries = []
    for (rank, _), ledger in sorted(chosen.items(), key=lambda item: item[0]):
        for place in ("device", "host", "disk"):
            lines = ledger.get(place) or {}
            kept = {name: size for name, size in lines.items() if size is not None}
            if any(kept.values()):
                taken = {name: ledger.get(name) for name in ("moment", "step", "phase")}
                entries.append({"rank": rank, "place": place, **taken, "lines": kept})
    return entries


def _worth(ledger: Mapping[str, Any]) -> tuple[int, float]:
    moment = str(ledger.get("moment"))
    order = _MOMENTS.index(moment) if moment in _MOMENTS else len(_MOMENTS)
    return -order, ledger["device"].get("used_bytes") or 0


def clean(value: Any) -> Any:
    """The same structure with nothing that JSON or a terminal could choke on: NaN and infinity
    become None, text becomes printable."""
    if isinstance(value, Mapping):
        return {printable(str(key)): clean(item) for key, item in value.items()}
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Sequence):
        return [clean(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
