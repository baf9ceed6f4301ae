"""Allocations of one process, which sends nothing."""

from launcher.forecast.buffers import Buffers, Whole
from launcher.forecast.timeline import Timeline
from launcher.forecast.traffic import Traffic, Wire
from launcher.strategies.rank import Rank


def buffers(rank: Rank, timeline: Timeline) -> Buffers:
    """Everything is allocated as it comes."""
    return Whole(rank, timeline)


def traffic(wire: Wire) -> Traffic:
    """A single process sends nothing."""
    return Traffic()
