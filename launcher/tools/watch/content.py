"""Contents of a GPU at the peak of a watched program, by category and by module.

Replays the events that `inside/shardscale_observer/history.py` has written.
"""

import array
import collections
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.forecast.allocator_blocks import EMPTY_CACHE
from launcher.strategies.ledger import CATEGORIES, STATES
from launcher.util.sizes import rounded_bytes

VERSION = 1
# Blocks of these phases that have no owner and outlive the forward are activations: they are kept
# for the backward.
_OF_FORWARD = ("forward", "data", "other", "build", "load")
_Owned = Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """Allocations and frees of one rank, and the marks between them."""

    events: Sequence[tuple[int, int, int]]
    """(address, bytes, stream); the bytes of a free are negative."""
    marks: Sequence[tuple[int, str, str, _Owned]]
    """(number of the next event, kind, name, address -> (category, module))."""
    held: Sequence[tuple[int, int]]
    """(address, bytes) of the blocks in use at the end."""
    expandable_segments: bool

    def before(self) -> dict[int, int]:
        """Return address -> bytes of the blocks that were in use before the first event."""
        blocks = dict(self.held)
        # backwards from the blocks at the end: an allocation was not there yet, a free still was
        for address, size, _ in reversed(self.events):
            if size >= 0:
                blocks.pop(address, None)
            else:
                blocks[address] = -size
        return blocks

    @property
    def ends_out_of_memory(self) -> bool:
        """Return True if a request found no memory, and no optimizer has stepped since."""
        marks = [kind for _, kind, _, _ in self.marks if kind in ("out_of_memory", "owners")]
        return marks[-1:] == ["out_of_memory"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """Bytes at one moment, rounded to blocks as the allocator counts them."""

    total_bytes: int
    phase: str
    by_category: Mapping[str, int]
    by_module: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Contents of a rank at its peak, and at the end of the recording."""

    peak: Content
    end: Content


@dataclass(slots=True, eq=False)
class _Piece:
    size: int
    phase: str
    module: str
    allocated: int
    freed: float = math.inf
    category: str | None = None


def read_recording(path: Path) -> Recording | None:
    """Read `path`.events and `path`.json; None where there is no complete recording."""
    try:
        content = json.loads(path.with_name(f"{path.name}.json").read_text(encoding="utf-8"))
        raw = path.with_name(f"{path.name}.events").read_bytes()
    except (OSError, ValueError):
        return None
    if content.get("version") != VERSION:
        return None
    numbers = array.array("q", raw)
    marks = content["marks"]
    # marks count the events of the whole process, the file begins at the first mark
    first = marks[0][0]
    return Recording(
        events=list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)),
        held=[(address, size) for address, size in content["held"]],
        marks=[(at - first, kind, name, owners) for at, kind, name, owners in marks],
        expandable_segments=bool(content["settings"].get("expandable_segments")),
    )


def held(recording: Recording) -> Held:
    """Return the content at the highest level (or out of memory), and at the end."""
    replay = _Replay(recording)
    replay.run()
    # a recording that ends out of memory ends within a step, where activations are alive
    if not recording.ends_out_of_memory:
        replay.set_apart_what_stays()
    at, phase = replay.peak
    return Held(
        peak=replay.content(at, phase),
        end=replay.content(len(recording.events), replay.phase),
    )


class _Replay:
    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._live: dict[int, _Piece] = {}
        self._pieces: list[_Piece] = []
        self.phase, self._module = "init/load", ""
        self.peak = (0, self.phase)
        """(number of the event after which it was reached, phase)."""

    def run(self) -> None:
        """Follow all events."""
        self._live = {
            address: _Piece(rounded_bytes(size), "", "", -1)
            for address, size in self._recording.before().items()
        }
        self._pieces = list(self._live.values())
        level = highest = sum(piece.size for piece in self._pieces)
        # -1: before the first event, where the blocks of `before` are alive
        self.peak = (-1, self.phase)
        marks = collections.deque(self._recording.marks)
        for number, (address, size, _) in enumerate(self._recording.events):
            while marks and marks[0][0] <= number:
                self._apply(*marks.popleft())
            if size >= 0:
                piece = _Piece(rounded_bytes(size), self.phase, self._module, number)
                self._live[address] = piece
                self._pieces.append(piece)
                level += piece.size
                if level > highest:
                    highest, self.peak = level, (number, self.phase)
            elif address in self._live:
                freed = self._live.pop(address)
                freed.freed = number
                level -= freed.size
        for mark in marks:
            self._apply(*mark)

    def set_apart_what_stays(self) -> None:
        """Take what is no state and outlives all steps as `other`: it is no activation.

        Workspaces of cuBLAS are made in the first forward, and stay.
        """
        for piece in self._live.values():
            if piece.category in (None, "activations"):
                piece.category = "other"

    def content(self, at: int, phase: str) -> Content:
        """Return the content after event `at`."""
        by_category: dict[str, int] = {}
        by_module: dict[str, int] = {}
        for piece in self._pieces:
            if piece.allocated <= at < piece.freed:
                category = piece.category or "temporary"
                by_category[category] = by_category.get(category, 0) + piece.size
                name = collapsed(piece.module)
                by_module[name] = by_module.get(name, 0) + piece.size
        return Content(
            total_bytes=sum(by_category.values()),
            phase=phase,
            by_category=by_category,
            by_module=dict(sorted(by_module.items(), key=lambda item: -item[1])),
        )

    def _apply(self, _: int, kind: str, name: str, owners: _Owned) -> None:
        if kind == "phase":
            self.phase = name
        elif kind == "module":
            self._module = name
        elif kind == "owners":
            self._own(owners)
        elif kind == "end_forward":
            # Weights that are gathered now are states of no step: they are temporary.
            self._keep_activations(set(owners))
        elif kind == "out_of_memory":
            self._own(owners)
            # this forward ends without its `end_forward`
            if self.phase.endswith("/forward"):
                self._keep_activations(set())

    def _own(self, owners: _Owned) -> None:
        for address, (category, module) in owners.items():
            piece = self._live.get(int(address))
            if piece is not None:
                piece.category, piece.module = category, module

    def _keep_activations(self, gathered: set[str]) -> None:
        in_forward = self.phase.endswith("/forward")  # of a module, else all before is one
        for address, piece in self._live.items():
            if piece.category is None and piece.phase.rpartition("/")[2] in _OF_FORWARD:
                # what was there before any forward is a teacher's, or data
                before = in_forward and piece.phase == "init/load"
                kept = "other" if before else "activations"
                piece.category = "temporary" if str(address) in gathered else kept


def collapsed(module: str) -> str:
    """Return a module's name with every number as `*`: all layers of a list are one line."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", module) or "(outside of modules)"


def allocator_events(
    recording: Recording,
) -> tuple[list[tuple[int, int]], dict[int, str]]:
    """Return the events for the model of the allocator, and the streams of their storages."""
    events: list[tuple[int, int]] = []
    streams: dict[int, str] = {}
    live: dict[int, int] = {}
    emptied = (at for at, kind, _, _ in recording.marks if kind == "empty_cache")
    due = next(emptied, None)
    for number, (address, size, stream) in enumerate(recording.events):
        while due is not None and due <= number:
            events.append((EMPTY_CACHE, 0))
            due = next(emptied, None)
        if size > 0:
            live[address] = number
            events.append((number, size))
            if stream:
                streams[number] = str(stream)
        # else a block from before the recording, which the replay knows nothing of
        elif size < 0 and address in live:
            events.append((live.pop(address), 0))
    return events, streams


def ledger_record(content: Content, step: int | None) -> dict[str, Any]:
    """Return a `ledger` record of the device at a peak, as launcher/strategies/ledger.py has it."""
    sizes = dict(content.by_category)
    # Workspaces that stay are no state.
    sizes["temporary"] = sizes.pop("other", 0) + sizes.get("temporary", 0)
    nothing = {f"{name}_bytes": 0 for name in STATES}
    lines = {f"{name}_bytes": sizes.get(name, 0) for name in CATEGORIES}
    return {
        "kind": "ledger",
        "moment": "peak",
        "step": step,
        "phase": content.phase.rpartition("/")[2],
        "device": {**lines, "used_bytes": content.total_bytes},
        "host": nothing,
        "disk": nothing,
    }
