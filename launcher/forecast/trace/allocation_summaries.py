"""Allocations and frees that nobody acts upon, summed up."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Final

from launcher.util.sizes import rounded_bytes


@dataclass(frozen=True, slots=True)
class Stretch:
    """Allocations and frees on the device that nobody acts upon, in program order."""

    events: tuple[tuple[Hashable, int], ...]
    """(storage, bytes), 0 bytes meaning freed."""
    rise_bytes: int
    """By how much its highest moment is above its beginning, in whole blocks; 0 where it never
    is."""
    lines_at_rise: tuple[tuple[str, int], ...]
    """(category, change of its bytes) up to that moment."""
    net_bytes: int
    """By how much its end is above its beginning, in whole blocks."""
    lines: tuple[tuple[str, int], ...]
    """(category, change of its bytes) up to its end."""


EMPTY: Final = Stretch((), 0, (), 0, ())


def stretch(changes: Iterable[tuple[Hashable, int, int, str]], *, whole_blocks: bool) -> Stretch:
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
    return Stretch(tuple(events), rise, at_rise, level, tuple(lines.items()))


def _blocks(change: int) -> int:
    return rounded_bytes(change) if change > 0 else -rounded_bytes(-change)
