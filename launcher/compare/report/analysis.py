"""Figures of a run, the reference that its losses are compared with, and the difference."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from launcher.compare.report.runs import Run
from launcher.compare.report.series import STEP_PEAKS
from launcher.config.model import LORA, ModelChoice
from launcher.config.schema import OptimChoice
from launcher.measure.hardware import peak_flops_per_s
from launcher.strategies import VARIANTS
from launcher.util.errors import UserError

MEMORY_KINDS = {
    "allocated_peak_bytes": "allocated peak",
    "reserved_peak_bytes": "reserved peak",
    "device_used_bytes": "device used",
    "tracked_live_bytes": "tracked live peak",
    "resident_set_bytes": "resident set",
}
# These change how the same numbers are computed, not which numbers they are.
_SAME_MATHS = (
    *("attention", "activation_checkpointing", "loss_chunk", "mlp_tile"),
    "precision",
)
# Which parameters train: runs that differ here are compared, but not by their losses.
_TRAINED = (*LORA, "quantize_base")
_MODEL = [
    f.name for f in dataclasses.fields(ModelChoice) if f.name not in (*_SAME_MATHS, *_TRAINED)
]
_SAME_LOSSES = [
    *(*_MODEL, *_TRAINED),
    *("data", "data_field", "mask_prompt", "document_attention"),
    *("tokenizer", "seq_len", "global_batch", "seed", "steps"),
    *(f.name for f in dataclasses.fields(OptimChoice) if f.name not in _SAME_MATHS),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFigures:
    """Headline figures of a run. Memory is the worst rank's; kinds are never mixed."""

    tokens_per_s: float | None
    tokens_per_s_per_rank: float | None
    step_time_s: float | None
    tflops_per_rank: float | None
    mfu: float | None
    memory: Mapping[str, int | None]
    test_loss: float | None
    perplexity: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LossDifference:
    """Largest |loss - reference loss| over the steps that both runs have.

    `gap_steps` and `gaps` are |difference| per step, for the chart. `not_finite` counts the steps
    where exactly one of the losses is finite.
    """

    reference: str
    largest: float
    at_step: int
    not_finite: int
    gap_steps: NDArray[np.int64]
    gaps: NDArray[np.float64]


def figures(run: Run) -> RunFigures:
    """Compute a run's figures from its summary, or from its steps without one."""
    record, summary, steps = run.record, run.summary, run.steps
    rate = summary.tokens_per_s or (steps.tokens_per_s if steps else None)
    ranks = record.get("world_size") or summary.world_size
    per_rank = rate / ranks if rate and ranks else None
    flops_per_token = record.get("flops_per_token")
    flops = per_rank * flops_per_token if per_rank and flops_per_token else None
    peak_flops = peak_flops_per_s(record.get("device_name"))
    return RunFigures(
        tokens_per_s=rate,
        tokens_per_s_per_rank=per_rank,
        step_time_s=steps.step_time_s if steps else None,
        tflops_per_rank=flops / 1e12 if flops else None,
        mfu=flops / peak_flops if flops and peak_flops else None,
        memory=_memory(run),
        test_loss=summary.test_loss,
        perplexity=summary.perplexity,
    )


def _memory(run: Run) -> dict[str, int | None]:
    by_phase = [record.get("peak_bytes") for _, record in run.phases]
    of_steps = run.steps.peaks_bytes if run.steps else {}
    allocated, reserved, used = map(of_steps.get, STEP_PEAKS)
    if run.on_gpu:
        found = {
            "allocated_peak_bytes": [allocated, *by_phase, *_of_summary(run, "allocated")],
            "reserved_peak_bytes": [reserved],
            "device_used_bytes": [used, *_sampled(run, "memory_used_bytes")],
        }
    else:
        # On a CPU the steps' figure and the summary's are the process's resident set.
        in_ledgers = [
            ledger["device"].get("used_bytes")
            for _, ledger in run.ledgers
            if ledger.get("moment") == "peak"
        ]
        found = {
            "resident_set_bytes": [
                *(used, *_sampled(run, "host_rss_bytes"), *_of_summary(run, "resident"))
            ],
            "tracked_live_bytes": [*by_phase, *in_ledgers],
        }
    return dict.fromkeys(MEMORY_KINDS) | {
        kind: max((size for size in sizes if size is not None), default=None)
        for kind, sizes in found.items()
    }


def _of_summary(run: Run, kind: str) -> list[int | None]:
    return [run.summary.peak_bytes] if str(run.summary.peak_kind).startswith(kind) else []


def _sampled(run: Run, reading: str) -> list[int]:
    return [int(t.peaks[reading]) for t in run.timelines if reading in t.peaks]


def differing_settings(run: Run, reference: Run) -> list[str]:
    """List the config fields that differ and make two loss curves differ by intent."""
    return [name for name in _SAME_LOSSES if run.config.get(name) != reference.config.get(name)]


def choose_references(runs: Sequence[Run], named: str | None) -> dict[str, Run]:
    """Choose for each run the reference of its losses.

    The named run, else the first single (else ddp) run of equal settings: fp32 before other
    precisions, and unsharded sequences and matrices before sharded ones.

    Raises:
        UserError: no run with steps has that name.
    """
    with_steps = [run for run in runs if run.steps is not None]
    if named is not None:
        chosen = next((run for run in with_steps if run.name == named), None)
        if chosen is None:
            names = ", ".join(run.name for run in with_steps) or "none"
            raise UserError(f"--reference {named}: no run with steps has this name: {names}")
        return {run.name: chosen for run in runs}
    order = [variant.label for variant in VARIANTS.values() if variant.level == 0]
    candidates = sorted(
        (run for run in with_steps if run.record.get("strategy") in order),
        key=lambda run: (
            not run.completed,
            order.index(run.record["strategy"]),
            run.record.get("precision") != "fp32",
            any(run.config.get(f"{what}_parallel", 1) != 1 for what in ("context", "tensor")),
        ),
    )
    kept = {r.name: tuple(str(r.config.get(name)) for name in _SAME_LOSSES) for r in runs}
    alike = Counter(kept.values())
    first = {kept[candidate.name]: candidate for candidate in reversed(candidates)}
    references = {}
    for run in runs if candidates else ():
        settings = kept[run.name]
        # A run with settings of its own is not its own reference: its note names what differs from
        # the first candidate.
        alone = alike[settings] == 1
        references[run.name] = candidates[0] if alone else first.get(settings, candidates[0])
    return references


def loss_difference(run: Run, reference: Run | None) -> LossDifference | None:
    """Compare the losses of two runs; None without common steps or with differing settings."""
    if reference is None or reference is run or differing_settings(run, reference):
        return None
    if run.steps is None or reference.steps is None:
        return None
    steps, mine, theirs = np.intersect1d(
        run.steps.step, reference.steps.step, assume_unique=True, return_indices=True
    )
    a, b = run.steps.loss[mine], reference.steps.loss[theirs]
    finite = np.isfinite(a) & np.isfinite(b)
    if not finite.any():
        return None
    gaps = np.abs(a - b)
    worst = int(np.nanargmax(np.where(finite, gaps, np.nan)))
    return LossDifference(
        reference=reference.name,
        largest=float(gaps[worst]),
        at_step=int(steps[worst]),
        not_finite=int(np.sum(np.isfinite(a) != np.isfinite(b))),
        gap_steps=steps,
        gaps=gaps,
    )


def setting(run: Run) -> str:
    """Describe what runs must share for their speed and memory to be compared."""
    record = run.record
    shape = {name: run.config[name] for name in _MODEL if name in run.config and name != "model"}
    dimensions = "".join(f", {name} {value}" for name, value in shape.items() if name != "dropout")
    place = record.get("device_name") or ("GPU" if run.on_gpu else "CPU")
    return f"{record.get('model')}{dimensions}, sequences of {record.get('seq_len')}, {place}"
