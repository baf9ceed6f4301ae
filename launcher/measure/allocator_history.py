"""Contents of a GPU at the peak of a step, replayed from the caching allocator's history."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from launcher.measure.live_trace import PeakContent
from launcher.util.sizes import rounded_bytes


@dataclass(slots=True, eq=False)
class _Block:
    requested_bytes: int
    block_bytes: int
    phase: str
    allocated: int  # number of the event
    freed: float = math.inf
    category: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mark:
    """A position in the allocator's events, and the owners of blocks at that moment."""

    events: int
    phase: str
    owners: Mapping[int, str]
    """Address -> category."""
    ends_forward: bool = False


class AllocatorHistory:
    """All allocations and frees of one step on one GPU.

    Marks are positions in the history: the allocator counts the same events that it records. So
    the history is read once, at the end, and may be the user's own (`--memory-trace`).
    """

    def __init__(self, device: torch.device, *, is_recorded: bool) -> None:
        self._device = device
        self._is_recorded = is_recorded
        self._marks: list[_Mark] = []

    def record(self, owners: Mapping[int, str]) -> None:
        """Start recording; `owners` are the states held now."""
        if not self._is_recorded:
            torch.cuda.memory._record_memory_history("all", context=None)
        self._marks = [_Mark(events=self._events(), phase="data", owners=owners)]

    def enter(self, phase: str, owners: Mapping[int, str] | None = None) -> None:
        """Begin a phase; `owners` are the blocks of states at this moment."""
        self._marks.append(_Mark(events=self._events(), phase=phase, owners=owners or {}))

    def end_forward(self, gathered: Mapping[int, str]) -> None:
        """End a forward, whose blocks are kept for the backward, except `gathered` weights."""
        mark = _Mark(events=self._events(), phase="forward", owners=gathered, ends_forward=True)
        self._marks.append(mark)

    def stop(self, owners: Mapping[int, str]) -> PeakContent:
        """Stop recording; return the bytes by category at the peak. `owners` are held now."""
        self.enter("step", owners)
        snapshot: Any = torch.cuda.memory._snapshot(self._device)
        if not self._is_recorded:
            torch.cuda.memory._record_memory_history(None)
        index = self._device.index
        # The allocator's counters, and so the marks, count a free at its request. It completes
        # later where another stream still uses the block.
        trace = [
            event
            for event in snapshot["device_traces"][index]
            if event["action"] in ("alloc", "free_requested")
        ]
        first, last = self._marks[0].events, self._marks[-1].events
        # a history of the whole run (`--memory-trace`) begins before this step
        events = trace[len(trace) - (last - first) :]
        held = {
            block["address"]: (block["requested_size"], block["size"])
            for segment in snapshot["segments"]
            if segment["device"] == index
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        }
        return self._replay(_before(events, held), events)

    def _events(self) -> int:
        counts = torch.cuda.memory_stats_as_nested_dict(self._device)["allocation"]["all"]
        count: int = counts["allocated"] + counts["freed"]
        return count

    def _replay(
        self, held: Mapping[int, tuple[int, int]], events: list[dict[str, Any]]
    ) -> PeakContent:
        live = {
            address: _Block(requested, size, "", allocated=-1)
            for address, (requested, size) in held.items()
        }
        blocks = list(live.values())
        level = sum(block.block_bytes for block in blocks)
        highest, at, peak_phase = level, -1, "data"
        first, phase, marks = self._marks[0].events, "data", iter(self._marks)
        mark = next(marks, None)
        for number in range(len(events) + 1):
            while mark is not None and mark.events - first == number:
                phase = mark.phase
                _apply(mark, live)
                mark = next(marks, None)
            if number == len(events):
                break
            address, size = events[number]["addr"], events[number]["size"]
            if events[number]["action"] == "alloc":
                # events have requested bytes; blocks are larger
                block = live[address] = _Block(size, rounded_bytes(size), phase, allocated=number)
                blocks.append(block)
                level += block.block_bytes
                if level > highest:
                    highest, at, peak_phase = level, number, phase
            else:
                block = live.pop(address)
                block.freed = number
                level -= block.block_bytes
        by_category = {"temporary": highest}  # rounding belongs to no tensor
        for block in blocks:
            category = block.category or "temporary"
            if block.allocated <= at < block.freed and category != "temporary":
                by_category["temporary"] -= block.requested_bytes
                by_category[category] = by_category.get(category, 0) + block.requested_bytes
        return PeakContent(total_bytes=highest, phase=peak_phase, by_category=by_category)


def _apply(mark: _Mark, live: Mapping[int, _Block]) -> None:
    if not mark.ends_forward:
        for address, category in mark.owners.items():
            if address in live:
                live[address].category = category
        return
    for address, block in live.items():
        if block.category is None and block.phase in ("data", "forward"):
            block.category = "temporary" if address in mark.owners else "activations"


def _before(
    events: list[dict[str, Any]], held: Mapping[int, tuple[int, int]]
) -> dict[int, tuple[int, int]]:
    """Return the blocks held before the events: address -> bytes (requested, allocated)."""
    blocks = dict(held)
    for event in reversed(events):
        if event["action"] == "alloc":
            blocks.pop(event["addr"])
        else:
            blocks[event["addr"]] = (event["size"], rounded_bytes(event["size"]))
    return blocks
