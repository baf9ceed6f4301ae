"""Steps and device samples of a rank, as arrays and as thinned curves for charts."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher.compare.report.records import sound_record
from launcher.measure import PHASES
from launcher.measure.records import WARMUP_STEPS

Floats = NDArray[np.float64]

FEWEST = 5  # steps needed for quartiles
# Records begin with `kind`, so that steps are recognised without parsing each line twice.
STEP_PREFIX, RUN_PREFIX = '{"kind": "step", ', '{"kind": "run", '
STEP_PEAKS = ("allocated_peak_bytes", "reserved_peak_bytes", "device_used_bytes")
EXPERTS = ("expert_load_max", "expert_entropy")
_TIMES = ("duration_s", *(f"{name}_s" for name in PHASES))
_KEPT = ("step", "loss", "tokens", *_TIMES, *STEP_PEAKS, *EXPERTS)
_WARM_UP = "warm_up"
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
    """Steps of one rank, in order, each once.

    Means (seconds per step, seconds by phase, global tokens/s) are over the `steady_steps` after
    the warm-up of each start, None without any; phase `other` is time outside all phases.
    `rate_quartiles` are the 25th, 50th and 75th percentiles of tokens/s per step, None with too few
    steps.
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
    """Maximum of each of `STEP_PEAKS`."""
    expert_load_max: float | None
    expert_entropy: float | None


def read_steps(text: str) -> tuple[StepSeries | None, int]:
    """Read all step records in the text of a `rank<N>.jsonl`.

    Returns:
        The series (None without steps), and the number of damaged step lines.
    """
    lines: list[str] = []
    warm_up = set(range(WARMUP_STEPS))  # numbers of lines
    for line in text.split("\n"):
        if line.startswith(STEP_PREFIX):
            lines.append(line)
        elif line.startswith(RUN_PREFIX):  # a start: it compiles and connects anew
            warm_up.update(range(len(lines), len(lines) + WARMUP_STEPS))
    # Streamed into the array: there may be millions of steps.
    found = ((n, r) for n, r in enumerate(map(sound_record, lines)) if r is not None)
    kept = ((float(n in warm_up), *map(_number, map(r.get, _KEPT))) for n, r in found)
    rows = np.fromiter(kept, dtype=(float, 1 + len(_KEPT)))
    series = _series(dict(zip((_WARM_UP, *_KEPT), rows.T, strict=True))) if len(rows) else None
    return series, len(lines) - len(rows)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _series(columns: dict[str, Floats]) -> StepSeries:
    # A step repeated after a restart counts once, with its last record.
    backwards = columns["step"][::-1]
    _, last = np.unique(backwards, return_index=True)
    columns = {name: values[::-1][last] for name, values in columns.items()}
    duration_s = columns["duration_s"]
    steady = columns[_WARM_UP] == 0
    total_s = float(np.sum(duration_s[steady]))
    phases_s = None
    if total_s > 0:
        phases_s = {name: float(np.mean(columns[f"{name}_s"][steady])) for name in PHASES}
        phases_s["other"] = max(0.0, float(np.mean(duration_s[steady])) - sum(phases_s.values()))
        if not all(map(math.isfinite, phases_s.values())):
            phases_s = None
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = (columns["tokens"] / duration_s)[steady]
        mean_rate = np.sum(columns["tokens"][steady]) / total_s
    rates = rates[np.isfinite(rates)]
    quartiles = np.quantile(rates, (0.25, 0.5, 0.75)).tolist() if len(rates) >= FEWEST else None
    return StepSeries(
        step=columns["step"].astype(np.int64),
        loss=columns["loss"],
        step_time_s=float(np.mean(duration_s[steady])) if total_s > 0 else None,
        phases_s=phases_s,
        # unknown of some watched programs: NaN, by which nothing can be sorted
        tokens_per_s=float(mean_rate) if np.isfinite(mean_rate) else None,
        steady_steps=len(rates),
        rate_quartiles=None if quartiles is None else (quartiles[0], quartiles[1], quartiles[2]),
        first_step_s=float(duration_s[0]),
        **{name: _last(columns[name]) for name in EXPERTS},
        peaks_bytes={kind: _highest(columns[kind]) for kind in STEP_PEAKS},
    )


def _highest(values: Floats) -> int | None:
    known = values[np.isfinite(values)]
    return int(known.max()) if len(known) else None


def _last(values: Floats) -> float | None:
    return float(values[-1]) if np.isfinite(values[-1]) else None


def thin(x: NDArray[Any], y: Floats, points: int) -> tuple[list[float], list[float | None]]:
    """Thin a curve to about `points` points, keeping the extremes of every bucket.

    Non-finite values become None, a gap. The first and the last point stay.
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
class DeviceSamples:
    """Samples of one rank's device: `t_s`, and for each reading a value or None per time.

    Buckets keep the maximum of memory and temperature, the mean of utilization and power. `peaks`
    are maxima over all samples.
    """

    rank: int
    source: str
    t_s: Sequence[float]
    readings: Mapping[str, Sequence[float | None]]
    peaks: Mapping[str, float]


def timeline(rank: int, samples: Sequence[Mapping[str, Any]]) -> DeviceSamples:
    """Aggregate `gpu` records (at least one) into at most BUCKETS intervals of equal length."""
    samples = sorted(samples, key=lambda sample: float(sample["t_s"]))
    end_s = float(samples[-1]["t_s"])
    width_s = max(end_s / BUCKETS, 1e-9)  # one sample at 0 s has no width
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
    return DeviceSamples(
        rank=rank,
        source="nvml" if nvml else str(samples[-1].get("source")),
        t_s=[float(bucket[0]["t_s"]) for bucket in buckets.values()],
        readings=readings,
        peaks=peaks,
    )


def _known(samples: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [float(value) for s in samples if isinstance(value := s.get(name), int | float)]
