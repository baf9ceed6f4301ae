"""Seconds and peaks per period and phase, for the closing records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

WARMUP_STEPS = 2


class PhaseLog:
    """Sums of seconds over the first step and the steady ones, and peaks of every phase."""

    def __init__(self) -> None:
        self._seconds: dict[str, tuple[int, dict[str, float]]] = {}
        self._peaks: dict[tuple[str, str], tuple[int, ...]] = {}

    def add_step(self, number: int, seconds: dict[str, float | None]) -> None:
        """Add a step's seconds by field."""
        if 1 < number <= WARMUP_STEPS:
            return
        period = "first_step" if number == 1 else "steady"
        count, sums = self._seconds.get(period, (0, {}))
        for name, value in seconds.items():
            if value is not None:
                sums[name] = sums.get(name, 0.0) + value
        self._seconds[period] = (count + 1, sums)

    def add_peaks(self, period: str, phase: str, peaks: tuple[int, int]) -> None:
        """Add (allocated, reserved) peak bytes of a phase."""
        before = self._peaks.get((period, phase), (0, 0))
        self._peaks[period, phase] = tuple(map(max, before, peaks))

    def records(self, *, with_memory: bool) -> Iterator[dict[str, Any]]:
        """Yield the fields of the phase records."""
        for (period, phase), (allocated, reserved) in self._peaks.items():
            count, sums = self._seconds.get(period, (0, {}))
            record: dict[str, Any] = {"period": period, "phase": phase, "steps": count}
            if f"{phase}_s" in sums:
                record["mean_s"] = sums[f"{phase}_s"] / count
            if with_memory:
                record |= {"peak_bytes": allocated, "reserved_peak_bytes": reserved}
            yield record
