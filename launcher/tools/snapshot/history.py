"""Contents of a device over time, from the events of its allocator and its state at the end."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from launcher.tools.snapshot.places import EARLIER, PHASES, Origin, origin_of
from launcher.tools.snapshot.read import Entry

MOST_POINTS: Final = 1500
"""Points of a timeline; each is the highest moment among the events that it stands for."""
_GROWS: Final = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_IN_USE: Final = ("active_allocated", "active_awaiting_free")
_Life = tuple[Origin, int, int, int]
"""Origin of an allocation, its bytes, and the numbers of its event and its free: -1 where it is
older than the recording, and one behind the last where it is alive at the end."""


@dataclass(frozen=True, slots=True)
class Point:
    """A moment of the timeline."""

    event: int
    """Number of the event, from 0."""
    allocated_bytes: int
    """Bytes of all tensors."""
    reserved_bytes: int
    by_phase: tuple[int, ...]
    """Allocated bytes by the phase that allocated them, in the order of `PHASES`."""


@dataclass(slots=True)
class Held:
    """Allocations of one origin."""

    origin: Origin
    size_bytes: int = 0
    tensors: int = 0
    byte_events: int = 0
    """Sum of bytes x events that they lived for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceHistory:
    """One device of a snapshot."""

    device: int
    events: int
    points: Sequence[Point]
    peak: Point
    peak_reserved_bytes: int
    at_peak: Sequence[Held]
    """Allocations alive at the peak, largest first."""
    over_time: Sequence[Held]
    """All allocations of the recording, those first that occupied most for longest."""
    fragmentation: Mapping[str, int]
    """Segments of the device at the end of the recording, as `_fragmentation` counts them."""
    out_of_memory: Sequence[int]
    """Bytes that were asked for in vain."""


def device_histories(snapshot: Mapping[str, Any]) -> list[DeviceHistory]:
    """Return a history per device that the snapshot has events or segments of."""
    traces: list[list[Entry]] = snapshot.get("device_traces", [])
    segments: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for segment in snapshot["segments"]:
        segments[int(segment.get("device", 0))].append(segment)
    devices = sorted({n for n, trace in enumerate(traces) if trace} | set(segments))
    return [_history(n, traces[n] if n < len(traces) else [], segments[n]) for n in devices]


def _history(
    device: int, trace: Sequence[Entry], segments: Sequence[Mapping[str, Any]]
) -> DeviceHistory:
    lives = _lives(trace, segments)
    points, peak_reserved_bytes = _timeline(trace, lives, _reserved_before(trace, segments))
    peak = max(points, key=lambda point: point.allocated_bytes)  # the first of them
    over_time: dict[Origin, Held] = {}
    for origin, size_bytes, first, freed in lives:
        if first >= 0:
            _add(over_time, origin, size_bytes, freed - first)
    at_peak: dict[Origin, Held] = {}
    for origin, size_bytes, first, freed in sorted(lives, key=lambda life: (life[2] < 0, life[2])):
        if first <= peak.event < freed:
            _add(at_peak, origin, size_bytes, 0)
    return DeviceHistory(
        device=device,
        events=len(trace),
        points=points,
        peak=peak,
        peak_reserved_bytes=peak_reserved_bytes,
        at_peak=sorted(at_peak.values(), key=lambda held: -held.size_bytes),
        over_time=sorted(over_time.values(), key=lambda held: -held.byte_events),
        fragmentation=_fragmentation(segments),
        out_of_memory=[int(e.get("size", 0)) for e in trace if e["action"] == "oom"],
    )


def _lives(trace: Sequence[Entry], segments: Iterable[Mapping[str, Any]]) -> list[_Life]:
    """Return what the recording allocates, and what is older than it."""
    found: list[_Life] = []
    known: dict[int, Origin] = {}
    alive: dict[int, tuple[Entry, int]] = {}
    for number, entry in enumerate(trace):
        if entry["action"] == "alloc":
            alive[entry["addr"]] = (entry, number)
        # free_requested changes nothing yet: other streams may still use the block
        elif entry["action"] == "free_completed":
            made, first = alive.pop(entry["addr"], (None, -1))
            origin = EARLIER if made is None else origin_of(made, known)
            found.append((origin, int((made or entry)["size"]), first, number))
    for made, first in alive.values():
        found.append((origin_of(made, known), int(made["size"]), first, len(trace)))
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            at = block.get("address", address)
            if block["state"] in _IN_USE and at not in alive:
                size_bytes = int(block.get("requested_size", block["size"]))
                found.append((EARLIER, size_bytes, -1, len(trace)))
            address = at + block["size"]
    return found


def _add(found: dict[Origin, Held], origin: Origin, size_bytes: int, events: int) -> None:
    held = found.get(origin)
    if held is None:
        held = found[origin] = Held(origin)
    held.size_bytes += size_bytes
    held.tensors += 1
    held.byte_events += size_bytes * events


def _growth(entry: Entry) -> int:
    """Return by how many bytes an event grows the segments."""
    return _GROWS[entry["action"]] * int(entry["size"]) if entry["action"] in _GROWS else 0


def _reserved_before(trace: Iterable[Entry], segments: Iterable[Mapping[str, Any]]) -> int:
    # backwards from the end: what there is then, less all growth
    return int(sum(segment["total_size"] for segment in segments)) - sum(map(_growth, trace))


def _timeline(
    trace: Sequence[Entry], lives: Iterable[_Life], reserved_bytes: int
) -> tuple[list[Point], int]:
    """Return the moment before the first event with the highest moment of each span of events, and
    the highest reserved bytes."""
    # [events, phases] of bytes; in the first row what is older than the recording
    changes = np.zeros((1 + len(trace), len(PHASES)), dtype=np.int64)
    changed = {number for number, entry in enumerate(trace) if entry["action"] in _GROWS}
    for origin, size_bytes, first, freed in lives:
        phase = PHASES.index(origin.phase)
        changes[1 + first, phase] += size_bytes
        if freed < len(trace):
            changes[1 + freed, phase] -= size_bytes
        changed |= {first, freed}
    levels = changes.cumsum(axis=0)
    allocated: list[int] = levels.sum(axis=1).tolist()
    reserved = [*itertools.accumulate(map(_growth, trace), initial=reserved_bytes)]
    every = max(1, -(-len(trace) // MOST_POINTS))
    highest = {-1: -1}  # span -> its highest event
    for event in sorted(changed & set(range(len(trace)))):
        known = highest.setdefault(event // every, event)
        if allocated[1 + event] > allocated[1 + known]:
            highest[event // every] = event
    points = [
        Point(event, allocated[1 + event], reserved[1 + event], tuple(levels[1 + event].tolist()))
        for event in highest.values()
    ]
    return points, max(reserved)


def _fragmentation(segments: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    free: list[int] = []
    stuck_bytes = 0
    for segment in segments:
        unused = [block["size"] for block in segment["blocks"] if block["state"] not in _IN_USE]
        free += unused
        if len(unused) < len(segment["blocks"]):
            stuck_bytes += sum(unused)
    reserved_bytes = sum(segment["total_size"] for segment in segments)
    return {
        "segments": len(segments),
        "reserved_bytes": reserved_bytes,
        "allocated_bytes": reserved_bytes - sum(free),
        "free_bytes": sum(free),  # in blocks that nothing uses
        "largest_free_bytes": max(free, default=0),  # that much needs no further segment
        "stuck_bytes": stuck_bytes,  # in segments that something in use keeps from being given back
    }
