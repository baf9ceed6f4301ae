"""What a rank's file says over its steps and over time, as arrays and as what a chart can show."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher.compare.report.records import sound_record
from launcher.measure.phases import PHASES
from launcher.measure.records import WARMUP_STEPS

Floats = NDArray[np.float64]

FEWEST = 5  # steps of which quartiles say something
STEP_PREFIX = '{"kind": "step", '
STEP_PEAKS = ("allocated_peak_bytes", "reserved_peak_bytes", "device_used_bytes")
_KEPT = ("step", "loss", "tokens", "duration_s", *(f"{name}_s" for name in PHASES), *STEP_PEAKS)
BUCKETS = 160
READINGS: dict[str, Callable[[Sequence[float]], float]] = {
    "memory_used_bytes": max,
    "host_rss_bytes": max,
    "gpu_utilization_percent": fmean,
    "power_w": fmean,
    "temperature_c": max,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeries:
    """What a report needs of one rank's steps, in step order, each step once.

    `step` and `loss` are arrays of one length. The means (seconds per step, by phase, and global
    tokens/s) are over the `steady_steps`, those after the warm-up, and None when there are none;
    `other` is what no phase claims. `rate_quartiles` are a quarter, a half and three quarters of
    the tokens/s of single steps, None where there are too few steps to say.
    """

    step: NDArray[np.int64]
    loss: Floats
    step_time_s: float | None
    phases_s: Mapping[str, float] | None
    tokens_per_s: float | None
    steady_steps: int
    rate_quartiles: tuple[float, float, float] | None
    first_step_s: float
    peaks_bytes: Mapping[str, int | None]
    """The highest of each of `STEP_PEAKS`."""


def read_steps(text: str) -> tuple[StepSeries | None, int]:
    """All step records in the text of a `rank<N>.jsonl`.

    Returns:
        The series, None when no step was finished; and how many step lines were damaged.
    """
    lines = [line for line in text.split("\n") if line.startswith(STEP_PREFIX)]
    # One after the other into the array: there may be millions of them.
    found = (record for record in map(sound_record, lines) if record is not None)
    kept = (tuple(map(_number, map(record.get, _KEPT))) for record in found)
    rows = np.fromiter(kept, dtype=(float, len(_KEPT)))
    series = _series(dict(zip(_KEPT, rows.T, strict=True))) if len(rows) else None
    return series, len(lines) - len(rows)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _series(columns: dict[str, Floats]) -> StepSeries:
    # A step that was repeated after a restart counts once: its last record is the one that stands.
    backwards = columns["step"][::-1]
    _, last = np.unique(backwards, return_index=True)
    columns = {name: values[::-1][last] for name, values in columns.items()}
    duration_s = columns["duration_s"]
    steady = slice(WARMUP_STEPS, None)
    total_s = float(np.sum(duration_s[steady]))
    phases_s = None
    if total_s > 0:
        phases_s = {name: float(np.mean(columns[f"{name}_s"][steady])) for name in PHASES}
        phases_s["other"] = max(0.0, float(np.mean(duration_s[steady])) - sum(phases_s.values()))
        if not all(map(math.isfinite, phases_s.values())):
            phases_s = None
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = (columns["tokens"] / duration_s)[steady]
    rates = rates[np.isfinite(rates)]
    quartiles = np.quantile(rates, (0.25, 0.5, 0.75)).tolist() if len(rates) >= FEWEST else None
    return StepSeries(
        step=columns["step"].astype(np.int64),
        loss=columns["loss"],
        step_time_s=float(np.mean(duration_s[steady])) if total_s > 0 else None,
        phases_s=phases_s,
        tokens_per_s=float(np.sum(columns["tokens"][steady])) / total_s if total_s > 0 else None,
        steady_steps=len(rates),
        rate_quartiles=None if quartiles is None else (quartiles[0], quartiles[1], quartiles[2]),
        first_step_s=float(duration_s[0]),
        peaks_bytes={kind: _highest(columns[kind]) for kind in STEP_PEAKS},
    )


def _highest(values: Floats) -> int | None:
    known = values[np.isfinite(values)]
    return int(known.max()) if len(known) else None


def thin(x: NDArray[Any], y: Floats, points: int) -> tuple[list[float], list[float | None]]:
    """A curve of at most about `points` points that keeps every bucket's extremes.

    Non-finite values become None, a gap. The first and the last point always stay.
    """
    if len(x) > points:
        edges = np.linspace(0, len(x), points // 2 + 1).astype(int)
        keep = {0, len(x) - 1}
        for start, end in itertools.pairwise(edges):
            part = y[start:end]
            if np.isfinite(part).any():
                keep |= {start + int(np.nanargmin(part)), start + int(np.nanargmax(part))}
            else:
                keep.add(int(start))
        chosen = sorted(keep)
        x, y = x[chosen], y[chosen]
    return x.tolist(), [value if math.isfinite(value) else None for value in y.tolist()]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """One rank's device over time: `t_s`, and for each reading a value or None per time.

    Memory and temperature keep the highest value of a bucket, utilisation and power its mean.
    `peaks` holds the highest value over all samples.
    """

    rank: int
    source: str
    t_s: Sequence[float]
    readings: Mapping[str, Sequence[float | None]]
    peaks: Mapping[str, float]


def timeline(rank: int, samples: Sequence[Mapping[str, Any]]) -> Timeline:
    """Put `gpu` records (at least one) into at most BUCKETS stretches of equal time."""
    samples = sorted(samples, key=lambda sample: float(sample["t_s"]))
    end_s = float(samples[-1]["t_s"])
    width_s = max(end_s / BUCKETS, 1e-9)
    buckets: dict[int, list[Mapping[str, Any]]] = {}
    for sample in samples:
        index = min(int(float(sample["t_s"]) / width_s), BUCKETS - 1)
        buckets.setdefault(index, []).append(sample)
    readings: dict[str, list[float | None]] = {}
    peaks: dict[str, float] = {}
    for name, reduce in READINGS.items():
        values = [_known(bucket, name) for bucket in buckets.values()]
        if not any(values):
            continue
        peaks[name] = max(max(known) for known in values if known)
        readings[name] = [reduce(known) if known else None for known in values]
    nvml = any(sample.get("source") == "nvml" for sample in samples)
    return Timeline(
        rank=rank,
        source="nvml" if nvml else str(samples[-1].get("source")),
        t_s=[float(bucket[0]["t_s"]) for bucket in buckets.values()],
        readings=readings,
        peaks=peaks,
    )


def _known(samples: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [float(value) for s in samples if isinstance(value := s.get(name), int | float)]
