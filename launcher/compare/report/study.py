"""The figures of the published study whose model is our `seed-134m`, beside our own.

They are another GPU's: an NVIDIA A40 (48 GB), decoder of 134,367,744 parameters, context 256,
Adam at 5e-4, batch 125. Memory in GB and seconds per step as the study prints them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.compare.report.analysis import Figures
from launcher.compare.report.runs import Run
from launcher.sizes import GIB

MODEL = "seed-134m"
LABEL = "NVIDIA A40, 48 GB (the study's)"
CAPTION = (
    "The study's figures are another GPU's, an NVIDIA A40: decoder of 134,367,744 parameters, "
    "context 256, Adam at 5e-4, batch 125; memory in GB as it prints them. Ours are in GiB (2^30 "
    "bytes). Compare how the choices relate within each GPU, not one GPU with the other."
)
# (choice, memory in forward / backward / step, seconds per step, largest batch)
_STUDY = (
    ("fp32", (24.9, 32.4, 32.4), 1.96, 125),
    ("bf16", (15.0, 22.4, 22.4), 0.90, 195),
    ("flash attention", (14.4, 21.9, 21.9), 0.40, 195),
    ("fp32, activation checkpointing", (6.7, 14.2, 14.2), 2.4, 303),
)
_STUDY_BATCH = 125
# Which choice each one belongs to is not certain, so they are only listed.
PERPLEXITIES = "Perplexity, as listed by the study: 132.01, 131.68, 130.92, 135.24."


def study_beside(runs: Sequence[Run], figures: Mapping[str, Figures]) -> dict[str, Any] | None:
    """The study's rows and ours, None when no run has its model."""
    ours = [run for run in runs if run.record.get("model") == MODEL]
    if not ours:
        return None
    rows = [
        _row(choice, LABEL, peaks, "GB", step_time_s, _STUDY_BATCH, largest_batch)
        for choice, peaks, step_time_s, largest_batch in _STUDY
    ]
    for run in ours:
        peaks = tuple(_peak_gib(run, phase) for phase in ("forward", "backward", "step"))
        place = str(run.record.get("device_name") or run.record.get("device"))
        step_time_s = figures[run.name].step_time_s
        batch = run.record.get("micro_batch")
        rows.append(_row(run.name, place, peaks, "GiB", step_time_s, batch, None))
    return {"caption": CAPTION, "perplexities": PERPLEXITIES, "rows": rows}


def _row(
    choice: str,
    place: str,
    peaks: Sequence[float | None],
    unit: str,
    step_time_s: float | None,
    batch: int | None,
    largest_batch: int | None,
) -> dict[str, Any]:
    return {
        "run": choice,
        "measured_on": place,
        "forward": peaks[0],
        "backward": peaks[1],
        "step": peaks[2],
        "unit": unit,
        "step_time_s": step_time_s,
        "batch": batch,
        "largest_batch": largest_batch,
    }


def _peak_gib(run: Run, phase: str) -> float | None:
    peaks = [
        record["peak_bytes"]
        for _, record in run.phases
        if record.get("period") == "steady"
        and record.get("phase") == phase
        and record.get("peak_bytes") is not None
    ]
    return max(peaks) / GIB if peaks else None
