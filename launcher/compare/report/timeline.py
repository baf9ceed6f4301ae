"""The sampler's records of one rank, thinned out to what a chart can show."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

BUCKETS = 160
READINGS: dict[str, Callable[[Sequence[float]], float]] = {
    "memory_used_bytes": max,
    "host_rss_bytes": max,
    "gpu_utilization_percent": fmean,
    "power_w": fmean,
    "temperature_c": max,
}


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
