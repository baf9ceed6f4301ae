"""A micro-batch in few words: what happens between two moments at which a strategy acts, summed up.

A strategy sees gradients, modules and the begin and end of segments. What the model allocates and
frees between those is the same under all of them, so its sums are formed once and not event by
event for each choice of a plan. The events themselves are kept for an allocator's replay.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from launcher.forecast.trace.allocation_summaries import AllocationSummary, summarize
from launcher.forecast.trace.events import (
    Allocated,
    Event,
    Freed,
    Gradient,
    Key,
    MicroBatch,
    Module,
    Place,
    Tuned,
)

Seen = AllocationSummary | Allocated | Freed | Gradient | Module | Tuned


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortened:
    """A micro-batch, segments in program order."""

    forward: list[tuple[Place, list[Seen]]]
    backward: list[tuple[Place, list[Seen]]]
    left: list[Seen]
    """The end of what the backward leaves."""

    @property
    def least_bytes(self) -> int:
        """Return the bytes that any strategy has at its peak: those of the micro-batch alone, as if
        a gradient were gone once it is whole."""
        level = highest = 0
        held: dict[Key, int] = {}
        for event in (e for _, events in (*self.forward, *self.backward) for e in events):
            if type(event) is AllocationSummary:
                highest = max(highest, level + event.rise_bytes)
                level += event.net_bytes
            elif type(event) is Allocated and event.where == "device":
                held[event.key] = event.size_bytes
                level += event.size_bytes
            elif type(event) is Freed or type(event) is Gradient:
                level -= held.pop(event.key, 0)  # 0 off the device, and once a gradient is gone
        return highest


def shortened(trace: MicroBatch, *, whole_blocks: bool) -> Shortened:
    """The same micro-batch, with all that no strategy acts upon in allocation_summaries.

    Gradients stay single events, and what is not on the device.
    """
    segments = (*trace.forward, *trace.backward)
    every = [event for _, events in segments for event in events]
    single = {e.key for e in every if isinstance(e, Gradient)}
    single |= {e.key for e in every if isinstance(e, Allocated) and e.where != "device"}
    lifetimes: dict[Key, Allocated] = {}

    def short(events: Iterable[Event]) -> list[Seen]:
        found: list[Seen] = []
        changes: list[tuple[Hashable, int, int, str]] = []
        for event in events:
            if isinstance(event, Allocated) and event.key not in single:
                if event.size_bytes:
                    lifetimes[event.key] = event
                    size_bytes = event.size_bytes
                    changes.append((event.key, size_bytes, size_bytes, event.category))
                continue
            if isinstance(event, Freed) and event.key not in single:
                if allocated := lifetimes.pop(event.key, None):  # else it was empty
                    changes.append((event.key, 0, -allocated.size_bytes, allocated.category))
                continue
            if changes:
                found.append(summarize(changes, whole_blocks=whole_blocks))
                changes = []
            found.append(event)
        if changes:
            found.append(summarize(changes, whole_blocks=whole_blocks))
        return found

    forward = [(place, short(events)) for place, events in trace.forward]
    backward = [(place, short(events)) for place, events in trace.backward]
    return Shortened(
        forward=forward, backward=backward, left=short(Freed(key) for key in trace.left)
    )
