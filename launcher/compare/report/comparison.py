"""The comparison of runs, as the one plain structure that every output is written from."""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from launcher.compare.report import analysis
from launcher.compare.report.columns import COLUMNS, Compared, printable
from launcher.compare.report.find import unique_tails
from launcher.compare.report.goals import best_by_goal, pareto, pareto_points
from launcher.compare.report.runs import Run
from launcher.strategies import VARIANTS
from launcher.util.sizes import GIB

REPORT_VERSION = 1
# Ledgers of these moments describe a rank best, in this order.
_MOMENTS = ("oom", "peak")
# Irrelevant to a comparison, or shown in a column of their own.
_NOT_A_SETTING = {
    *("out", "log_every", "report_to", "log_level", "collective_timeout_s"),
    *("max_minutes", "eval_every", "memory_trace", "device"),
    *("resume", "save_every", "test_batches", "micro_batch", "global_batch"),
    "sample_every",
    *("precision", "replicate", *(name for v in VARIANTS.values() for name in v.fields)),
}
_IMPLIED = (None, False, "none", "auto")  # settings that are off are not listed


class Report:
    """Comparison of runs: `data` is the JSON output; `compared` feeds the charts."""

    def __init__(
        self,
        runs: Sequence[Run],
        *,
        reference: str | None = None,
        memory_budget_bytes: int = 24 * GIB,
    ) -> None:
        figures = {run.name: analysis.figures(run) for run in runs}
        references = analysis.choose_references(runs, reference)
        # A cell that never started says nothing about itself: it is ranked with no other run.
        settings = {r.name: analysis.setting(r) if r.record.get("model") else None for r in runs}
        order = [*dict.fromkeys(filter(None, settings.values())), None]
        in_order = sorted(
            runs,
            key=lambda run: (
                order.index(settings[run.name]),
                not run.completed,
                -(figures[run.name].tokens_per_s or 0),
            ),
        )
        differs = differing(in_order)
        self.compared = [
            Compared(
                run=run,
                figures=figures[run.name],
                reference=references.get(run.name),
                difference=analysis.loss_difference(run, references.get(run.name)),
                position=position if setting and run.completed else None,
                setting=setting,
                differs=differs[run.name],
            )
            for setting, group in itertools.groupby(in_order, lambda run: settings[run.name])
            for position, run in enumerate(group, start=1)
        ]
        self.data = clean(self._data(memory_budget_bytes))

    def _data(self, budget_bytes: int) -> dict[str, Any]:
        groups: dict[str, list[Compared]] = {}
        for one in self.compared:
            if one.setting is not None:
                groups.setdefault(one.setting, []).append(one)
        fronts = {
            kind: set().union(*(pareto(pareto_points(group, kind)) for group in groups.values()))
            for kind in analysis.MEMORY_KINDS
        }
        rows = [
            _row(one)
            | {"pareto": [kind for kind, names in fronts.items() if one.run.name in names]}
            for one in self.compared
        ]
        keys = [
            c.key for c in COLUMNS if c.show == "always" or any(r[c.key] is not None for r in rows)
        ]
        if len(groups) == 1:
            keys.remove("setting")
        return {
            "report_version": REPORT_VERSION,
            "made_unix_s": time.time(),
            "columns": keys,
            "settings": [
                {"setting": setting, "goals": best_by_goal(group, budget_bytes)}
                for setting, group in groups.items()
            ],
            "runs": rows,
            "environments": environments([one.run for one in self.compared]),
        }


def _row(compared: Compared) -> dict[str, Any]:
    run = compared.run
    return {
        **{column.key: column.value(compared, column.key) for column in COLUMNS},
        **{name: run.record.get(name) for name in ("model", "parameters", "device_name")},
        "differs_brief": compared.differs[1] or None,
        "path": None if run.path is None else str(run.path),
        "loss_note": _loss_note(compared),
        "phases_s": run.steps and run.steps.phases_s,
        "peaks_by_phase": [{"rank": rank, **record} for rank, record in run.phases],
        "ledgers": _ledgers(run),
        "notes": list(run.notes),
    }


def _loss_note(compared: Compared) -> str | None:
    """Explain why the losses of a run are compared with nothing, or a caveat."""
    run, reference, difference = compared.run, compared.reference, compared.difference
    if run.steps is None:
        return "no step was finished"
    if reference is None:
        return "no single or ddp run to compare with (--reference NAME chooses one)"
    if run is reference:
        return "reference"
    if difference is None:
        names = analysis.differing_settings(run, reference)
        return f"differs from {reference.name} in {', '.join(names) or 'its steps'}"
    if difference.not_finite:
        return f"at {difference.not_finite} step(s) only one of the two losses is finite"
    return None


def differing(runs: Sequence[Run]) -> dict[str, tuple[str, str]]:
    """List for each run the settings in which not all runs agree, as `lr 0.001, window 64`.

    The second text has paths cut down to the tails that tell them apart.
    """
    known = [run for run in runs if run.config]
    keys = dict.fromkeys(key for run in known for key in run.config if key not in _NOT_A_SETTING)
    texts: dict[str, list[tuple[str, str]]] = {run.name: [] for run in runs}
    for key in keys:
        values = {run.name: run.config.get(key) for run in known}
        if len(set(map(str, values.values()))) == 1:
            continue
        tails = unique_tails({Path(value) for value in values.values() if _is_path(value)})
        for name, value in values.items():
            if value not in _IMPLIED:
                brief = tails[Path(value)] if _is_path(value) else value
                texts[name].append((f"{key} {value}", f"{key} {brief}"))
    return {
        name: (", ".join(whole for whole, _ in parts), ", ".join(brief for _, brief in parts))
        for name, parts in texts.items()
    }


def _is_path(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and "/" in value and not value.startswith("hf:")


def environments(runs: Sequence[Run]) -> list[str]:
    """List the versions that the runs were made with, each combination once."""
    found = []
    for run in runs:
        known, packages = run.environment, run.environment.get("packages", {})
        versions = {name: packages.get(name) for name in ("torch", "deepspeed")}
        versions |= {"Python": known.get("python"), "revision": known.get("git")}
        found.append(", ".join(f"{name} {one}" for name, one in versions.items() if one))
    return list(dict.fromkeys(filter(None, found)))


def _ledgers(run: Run) -> list[dict[str, Any]]:
    """Choose for each rank its best ledger and the predicted one, with one entry per place."""
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
    """Make a structure safe for JSON and terminals.

    NaN and infinity become None, text becomes printable.
    """
    if isinstance(value, Mapping):
        return {printable(str(key)): clean(item) for key, item in value.items()}
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Sequence):
        return [clean(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
