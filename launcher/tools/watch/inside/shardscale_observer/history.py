"""The CUDA allocator's history, with marks that say where in the program its events are."""

from __future__ import annotations

import array
import json
import os
import pickle
import sys
from typing import Any

from shardscale_observer.memory import Peaks

# The statistics that number the events count a free when it is requested. Its completion comes
# later where other streams use the block.
ACTIONS = ("alloc", "free_requested")
VERSION = 1


class History:
    """Records the allocations and frees of one device, and writes them for the launcher to read.

    Marks are positions in the history: the allocator counts the same events that it records. What
    they mean is worked out later (launcher/tools/watch/content.py), outside the program.

    torch has one history. A program that starts or stops one meanwhile reads ours, which goes on.
    """

    def __init__(
        self, torch: Any, peaks: Peaks, device: int, *, snapshot: bool = False, first: bool = False
    ) -> None:
        self._torch = torch
        self._peaks = peaks
        self.device = device
        self._snapshot = snapshot  # torch's own file is wanted besides, with stacks
        self._first = first  # nothing was allocated before `start`
        self.recording = self._of_program = False
        self._marks: list[list[Any]] = []
        self._calls: dict[str, Any] = {}

    def start(self) -> bool:
        """Start recording; False where the program records a history of its own."""
        self._of_program = self._torch._C._cuda_isHistoryEnabled()
        if self.recording or (self._of_program and not self._first):
            return False
        record = self._torch.cuda.memory._record_memory_history
        if self._snapshot or self._of_program:
            record("all", context="all", stacks="python")
        else:
            # without stacks, which cost time at each event
            record("all", context=None)
        self.recording = True
        # the legacy form, of a bool, would replace these settings: it is noted, and not called
        for suffix, function in (("", self._program_records), ("_legacy", self._program_asks)):
            name = f"_cuda_record_memory_history{suffix}"
            self._calls[name] = getattr(self._torch._C, name)
            setattr(self._torch._C, name, function)
        self._marks = []
        self.mark("begin", "")
        return True

    def _program_asks(self, enabled: Any, *_: Any) -> None:
        self._of_program = bool(enabled)

    def _program_records(self, enabled: Any, *rest: Any) -> None:
        """Give the program the stacks that it asks for, but keep every event."""
        self._of_program = enabled is not None
        if enabled is None:
            return
        # context, stacks, max_entries, clear_history, ..., skip_actions, and from torch 2.14 on
        # record_pinned_host_memory, record_cuda; older torch has fewer
        ours = (*rest[:2], sys.maxsize, False, *rest[4:6], [], *rest[7:8], True, *rest[9:])
        self._calls["_cuda_record_memory_history"]("all", *ours[: len(rest)])

    def mark(self, kind: str, name: str, owners: dict[int, tuple[str, str]] | None = None) -> None:
        """Note what begins at this event: `phase`, `module`, `owners`, `end_forward`, ..."""
        if self.recording:
            self._marks.append([self._peaks.events(self.device), kind, name, owners or {}])

    def stop(self, folder: str, name: str) -> None:
        """Stop recording and write `name`.events and `name`.json."""
        if not self.recording:
            return
        self.mark("end", "")
        snapshot = self._torch.cuda.memory._snapshot(self.device)
        self.recording = False
        for function, call in self._calls.items():
            setattr(self._torch._C, function, call)
        if not self._of_program:
            self._torch.cuda.memory._record_memory_history(None)
        total = self._marks[-1][0] - self._marks[0][0]
        trace = [
            event for event in snapshot["device_traces"][self.device] if event["action"] in ACTIONS
        ]
        if not 0 <= total <= len(trace):
            return  # events are missing: no recording is better than one of another program
        # Interleaved: address, size, stream; a free has a negative size.
        numbers = array.array("q")
        for event in trace[len(trace) - total :]:
            sign = 1 if event["action"] == "alloc" else -1
            numbers.extend((event["addr"], sign * event["size"], event["stream"]))
        settings = snapshot.get("allocator_settings", {})
        path = os.path.join(folder, name)
        with open(path + ".events", "wb") as file:
            numbers.tofile(file)
        content = {
            "version": VERSION,
            "marks": self._marks,
            "held": list(_held(snapshot, self.device)),
            "settings": {"expandable_segments": bool(settings.get("expandable_segments", False))},
        }
        with open(path + ".json", "w", encoding="utf-8") as text:
            json.dump(content, text)
        if self._snapshot:
            with open(path + ".pickle", "wb") as file:
                pickle.dump(snapshot, file)


def _held(snapshot: Any, device: int) -> Any:
    """Yield (address, requested bytes) of the blocks in use at the end."""
    for segment in snapshot["segments"]:
        if segment["device"] != device:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                yield block.get("address", address), block.get("requested_size", block["size"])
            address += block["size"]
