"""Sums of allocations and frees between two moments at which a strategy acts."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Final

from launcher.util.sizes import rounded_bytes


@dataclass(frozen=True, slots=True)
class AllocationSummary:
    """Allocations and frees on the device between two such moments, in program order."""

    events: tuple[tuple[Hashable, int], ...]
    """(storage, bytes), 0 bytes meaning freed."""
    rise_bytes: int
    """Peak above the level at its start, in whole allocator blocks; 0 if never above."""
    lines_at_rise: tuple[tuple[str, int], ...]
    """(category, change in bytes) up to that peak."""
    net_bytes: int
    """By how much its end is above its beginning, in whole blocks."""
    lines: tuple[tuple[str, int], ...]
    """(category, change of its bytes) up to its end."""


EMPTY: Final = AllocationSummary((), 0, (), 0, ())


def summarize(
    changes: Iterable[tuple[Hashable, int, int, str]], *, whole_blocks: bool
) -> AllocationSummary:
    """Sum up (storage, bytes, change of bytes, category); bytes are 0 where it is freed.

    Args:
        whole_blocks: levels are those of blocks of an allocator.
    """
    level = rise = 0
    lines: dict[str, int] = {}
    at_rise: tuple[tuple[str, int], ...] = ()
    events = []
    for key, size_bytes, change, category in changes:
        events.append((key, size_bytes))
        level += _blocks(change) if whole_blocks else change
        lines[category] = lines.get(category, 0) + change
        if level > rise:
            rise, at_rise = level, tuple(lines.items())
    return AllocationSummary(tuple(events), rise, at_rise, level, tuple(lines.items()))


def _blocks(change: int) -> int:
    return rounded_bytes(change) if change > 0 else -rounded_bytes(-change)
