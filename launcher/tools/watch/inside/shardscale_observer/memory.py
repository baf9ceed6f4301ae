"""Peaks of the CUDA caching allocator per phase, hidden from the program's own readings.

A peak per phase needs the allocator's peaks to be reset at each phase. The program must not notice:
what it reads as peak stays the highest since its own last reset.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Stats = dict[str, Any]


class Peaks:
    """Resets and reads the allocator's peaks; the program reads them as if never reset."""

    def __init__(self, torch: Any) -> None:
        self._c = torch._C
        self._stats = torch._C._cuda_memoryStats
        self._reset = torch._C._cuda_resetPeakMemoryStats
        self._reset_counts = torch._C._cuda_resetAccumulatedMemoryStats
        self._hidden: dict[int, Stats] = {}
        self._before_reset: dict[int, tuple[int, int]] = {}
        """Peaks since the last `take` that the program has reset."""
        self._uncounted: dict[int, int] = {}
        """Events before the program's last reset of the counts."""
        torch._C._cuda_resetAccumulatedMemoryStats = self._program_resets_counts
        torch._C._cuda_memoryStats = self._program_reads
        torch._C._cuda_resetPeakMemoryStats = self._program_resets

    def take(self, device: int) -> tuple[int, int]:
        """Return (allocated, reserved) peak bytes since the last call, and begin anew."""
        stats = self._stats(device)
        self._hidden[device] = _higher(stats, self._hidden.get(device))
        self._reset(device)
        return self._highest(stats, self._before_reset.pop(device, (0, 0)))

    def others(self, device: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield (GPU, (allocated, reserved) peak bytes) of those that this process uses besides
        `device`: DataParallel, a model on several."""
        for gpu in set(range(self._c._cuda_getDeviceCount())) - {device}:
            peaks = self._highest(self._stats(gpu), self._before_reset.get(gpu, (0, 0)))
            if any(peaks):
                yield gpu, peaks

    def events(self, device: int) -> int:
        """Return how many allocations and frees there were, which numbers the history's events."""
        count = self._stats(device)["allocation"]["all"]
        return int(count["allocated"] + count["freed"]) + self._uncounted.get(device, 0)

    def _program_reads(self, device: int) -> Stats:
        stats = self._stats(device)
        return _higher(stats, self._hidden.get(device)) if device in self._hidden else stats

    def _program_resets_counts(self, device: int) -> None:
        self._uncounted[device] = self.events(device)
        self._reset_counts(device)

    def _program_resets(self, device: int) -> None:
        before = self._before_reset.get(device, (0, 0))
        self._before_reset[device] = self._highest(self._stats(device), before)
        self._hidden.pop(device, None)
        self._reset(device)

    def _highest(self, stats: Stats, before: tuple[int, int]) -> tuple[int, int]:
        """Return (allocated, reserved) peak bytes of `stats`, or those before if higher."""
        return (
            max(stats["allocated_bytes"]["all"]["peak"], before[0]),
            max(stats["reserved_bytes"]["all"]["peak"], before[1]),
        )


def _higher(stats: Stats, hidden: Stats | None) -> Stats:
    """Return the statistics with the higher peaks of both."""
    if hidden is None:
        return stats
    merged: Stats = {}
    for name, value in stats.items():
        other = hidden.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            merged[name] = _higher(value, other)
        else:
            merged[name] = max(value, other) if name == "peak" and other is not None else value
    return merged
