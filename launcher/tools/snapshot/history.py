"""Contents of a device over time, from the events of its allocator and its state at the end."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from launcher.tools.snapshot.places import EARLIER, PHASES, Origin, origin_of
from launcher.tools.snapshot.read import Entry

MOST_POINTS: Final = 1500
"""Points of a timeline; each is the highest moment among the events that it stands for."""
_GROWS: Final = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_IN_USE: Final = ("active_allocated", "active_awaiting_free")


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
    known: dict[int, Origin] = {}
    earlier = _earlier(trace, segments)
    timeline = _Timeline(earlier, _reserved_before(trace, segments), len(trace))
    over_time: dict[Origin, Held] = {}
    for number, entry, made, first in _paired(trace):
        if entry["action"] in _GROWS:
            timeline.reserve(number, _GROWS[entry["action"]] * int(entry["size"]))
        elif made is None:
            timeline.change(number, EARLIER, -int(entry["size"]))
        elif entry is made:
            timeline.change(number, origin_of(made, known), int(made["size"]))
        else:
            origin, size_bytes = origin_of(made, known), int(made["size"])
            timeline.change(number, origin, -size_bytes)
            _add(over_time, origin, size_bytes, number - first)
    peak = timeline.peak
    at_peak = _alive(trace, peak.event, earlier, known)
    for _, made, first in _open(trace, len(trace)):
        _add(over_time, origin_of(made, known), int(made["size"]), len(trace) - first)
    return DeviceHistory(
        device=device,
        events=len(trace),
        points=timeline.points(),
        peak=peak,
        peak_reserved_bytes=timeline.peak_reserved_bytes,
        at_peak=sorted(at_peak.values(), key=lambda held: -held.size_bytes),
        over_time=sorted(over_time.values(), key=lambda held: -held.byte_events),
        fragmentation=_fragmentation(segments),
        out_of_memory=[int(e.get("size", 0)) for e in trace if e["action"] == "oom"],
    )


def _paired(trace: Iterable[Entry]) -> Iterator[tuple[int, Entry, Entry | None, int]]:
    """Yield (number, event, its allocation, number of that) of what changes any bytes; a free of
    something older has no allocation."""
    open_at: dict[int, tuple[Entry, int]] = {}
    for number, entry in enumerate(trace):
        action = entry["action"]
        if action == "alloc":
            open_at[entry["addr"]] = (entry, number)
            yield number, entry, entry, number
        # free_requested changes nothing yet: other streams may still use the block
        elif action == "free_completed":
            made, first = open_at.pop(entry["addr"], (None, -1))
            yield number, entry, made, first
        elif action in _GROWS:
            yield number, entry, None, -1


def _open(trace: Sequence[Entry], until: int) -> Iterator[tuple[int, Entry, int]]:
    """Yield (address, allocation, its number) of what the first `until` events leave alive."""
    alive: dict[int, tuple[Entry, int]] = {}
    for number in range(until):
        entry = trace[number]
        if entry["action"] == "alloc":
            alive[entry["addr"]] = (entry, number)
        elif entry["action"] == "free_completed":
            alive.pop(entry["addr"], None)
    for address, (made, first) in alive.items():
        yield address, made, first


def _earlier(
    trace: Sequence[Entry], segments: Iterable[Mapping[str, Any]]
) -> dict[int, tuple[int, int | None]]:
    """Return what is older than the recording: address -> (bytes, number of its free, if any)."""
    found: dict[int, tuple[int, int | None]] = {}
    for number, entry, made, _ in _paired(trace):
        # allocated before the recording, freed during it
        if made is None and entry["action"] == "free_completed":
            found[entry["addr"]] = (int(entry["size"]), number)
    # allocated before the recording, in use at its end
    recorded = {address for address, _, _ in _open(trace, len(trace))}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            at = block.get("address", address)
            if block["state"] in _IN_USE and at not in recorded:
                found[at] = (int(block.get("requested_size", block["size"])), None)
            address = at + block["size"]
    return found


def _alive(
    trace: Sequence[Entry],
    event: int,
    earlier: Mapping[int, tuple[int, int | None]],
    known: dict[int, Origin],
) -> dict[Origin, Held]:
    """Return what is alive after an event, by origin."""
    found: dict[Origin, Held] = {}
    for _, made, _ in _open(trace, event + 1):
        _add(found, origin_of(made, known), int(made["size"]), 0)
    for size_bytes, freed in earlier.values():
        if freed is None or freed > event:
            _add(found, EARLIER, size_bytes, 0)
    return found


def _add(found: dict[Origin, Held], origin: Origin, size_bytes: int, events: int) -> None:
    held = found.get(origin)
    if held is None:
        held = found[origin] = Held(origin)
    held.size_bytes += size_bytes
    held.tensors += 1
    held.byte_events += size_bytes * events


def _reserved_before(trace: Iterable[Entry], segments: Iterable[Mapping[str, Any]]) -> int:
    grown_bytes = sum(
        _GROWS[entry["action"]] * int(entry["size"]) for entry in trace if entry["action"] in _GROWS
    )
    # backwards from the end: what there is then, less all growth
    return int(sum(segment["total_size"] for segment in segments)) - grown_bytes


class _Timeline:
    """Levels by phase, and the highest moment of each span of events."""

    def __init__(
        self, earlier: Mapping[int, tuple[int, int | None]], reserved_bytes: int, events: int
    ) -> None:
        self._levels = dict.fromkeys(PHASES, 0)
        self._levels[EARLIER.phase] = sum(size_bytes for size_bytes, _ in earlier.values())
        self._allocated_bytes = self._levels[EARLIER.phase]
        self._reserved_bytes = self.peak_reserved_bytes = reserved_bytes
        self._every = max(1, -(-events // MOST_POINTS))
        self._highest: dict[int, Point] = {}
        self.peak = self._first = self._now(-1)

    def reserve(self, event: int, change: int) -> None:
        """Grow or shrink the segments."""
        self._reserved_bytes += change
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self._reserved_bytes)
        self._note(event)

    def change(self, event: int, origin: Origin, change: int) -> None:
        """Allocate or free."""
        self._levels[origin.phase] += change
        self._allocated_bytes += change
        self._note(event)

    def points(self) -> list[Point]:
        """Return the timeline, from the moment before the first event."""
        return [self._first, *(self._highest[span] for span in sorted(self._highest))]

    def _note(self, event: int) -> None:
        span = event // self._every
        known = self._highest.get(span)
        if known is None or self._allocated_bytes > known.allocated_bytes:
            point = self._highest[span] = self._now(event)
            if self._allocated_bytes > self.peak.allocated_bytes:
                self.peak = point

    def _now(self, event: int) -> Point:
        return Point(
            event, self._allocated_bytes, self._reserved_bytes, tuple(self._levels.values())
        )


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
