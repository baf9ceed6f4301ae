"""One run of a program on null GPUs, and what was recorded of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.measure.hardware import CONTEXT_BYTES
from launcher.measure.records import Status
from launcher.tools.rehearse.timeline import Timeline, read_timeline
from launcher.tools.watch import folder as folders
from launcher.tools.watch.content import Held, Recording, held, ledger_record, read_recording
from launcher.tools.watch.folder import WatchedRank


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One run of the program on null GPUs of one size."""

    folder: Path
    code: int
    status: Status
    ranks: Sequence[WatchedRank]
    recordings: Mapping[int, Recording]
    held: Mapping[int, Held]
    timelines: Mapping[int, Timeline]
    """Rank -> the timeline of one more step."""
    processes: Mapping[int, Mapping[str, int]]
    """Process that is no rank -> GPU -> bytes that it has reserved there at most."""

    @property
    def world_size(self) -> int:
        """Return the number of ranks; 0 if none has trained."""
        return int(self.ranks[0].run.get("world_size", 1)) if self.ranks else 0

    @property
    def steps(self) -> int:
        """Return the optimizer steps that were seen."""
        return max((len(rank.of_kind("step")) for rank in self.ranks), default=0)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the details of all ranks' events of a name, with the rank of each."""
        return [{"rank": rank.number, **one} for rank in self.ranks for one in rank.events(name)]

    @property
    def ended_well(self) -> bool:
        """Return True if the program did, or was only ended by a signal as its process ended."""
        ends = [rank.ended.get("reason") for rank in self.ranks]
        at_exit = bool(ends) and {*ends} == {"exit"} and not self.events("uncaught")
        seen = self.code == 0 or folders.all_seen(self.ranks)
        # Threads of a library may abort an interpreter that exits, as gloo's do (SIGABRT): all
        # steps of the program are over by then.
        return seen or (self.code < 0 and at_exit)

    @property
    def caught(self) -> Sequence[Mapping[str, Any]]:
        """Return the requests that found no memory, of a program that went on."""
        return self.events("out_of_memory") if self.ended_well else []

    @property
    def gave_up(self) -> bool:
        """Return True if the program caught its last failure, and a rank took no step after it."""
        return bool(self.caught) and any(
            recording.ends_out_of_memory for recording in self.recordings.values()
        )

    @property
    def ran_out(self) -> bool:
        """Return True if it ended because no memory was left, by itself or by the error."""
        return self.status.state == "oom" or self.gave_up

    @property
    def ran_out_later(self) -> bool:
        """Return True if the step after those that were recorded ran out of memory."""
        return any(event.get("out_of_memory") for event in self.events("no_timeline"))

    @property
    def other_gpus(self) -> list[dict[str, Any]]:
        """Return the peaks of each GPU that a rank uses besides its own."""
        return self.events("other_gpu")

    @property
    def others_bytes(self) -> int:
        """Return the most that is reserved on one of these."""
        return max((gpu["reserved_peak_bytes"] for gpu in self.other_gpus), default=0)

    def beside(self) -> dict[int, int]:
        """Return rank -> bytes that other processes take of its GPU, where they do: ranks that
        train or have loaded something there, and the process that has started them."""
        found: dict[int, int] = {}
        peaks = {rank.number: rank.reserved_peak_bytes or 0 for rank in self.ranks}
        own_gpus = self.events("own_gpu")
        for own in own_gpus:
            holders = [
                *self.processes.get(own["parent"], {}).items(),
                *((one["uuid"], peaks[one["rank"]]) for one in own_gpus if one is not own),
                *((other["uuid"], other["reserved_peak_bytes"]) for other in self.other_gpus),
            ]
            held = [size for gpu, size in holders if gpu == own["uuid"]]
            if held:
                found[own["rank"]] = sum(held) + CONTEXT_BYTES * len(held)
        return found

    @property
    def worst(self) -> WatchedRank:
        """Return the rank that needed most."""
        return max(self.ranks, key=lambda rank: rank.reserved_peak_bytes or 0)


def read_stage(folder: Path, code: int) -> Stage:
    """Read what a program left in its folder, and note there how it ended with `code`."""
    ranks = folders.read_ranks(folder)
    status, _ = folders.conclude(folder, ranks, code)
    recordings: dict[int, Recording] = {}
    contents: dict[int, Held] = {}
    timelines: dict[int, Timeline] = {}
    for rank in ranks:
        number = rank.number
        if recording := read_recording(folder / f"allocations-rank{number}"):
            recordings[number], contents[number] = recording, held(recording)
            folders.append(folder, rank, ledger_record(contents[number].peak, None))
        if timeline := read_timeline(folder / f"timeline-rank{number}"):
            timelines[number] = timeline
    return Stage(
        folder=folder,
        code=code,
        status=status,
        ranks=ranks,
        recordings=recordings,
        held=contents,
        timelines=timelines,
        processes={
            int(path.stem.removeprefix("process")): json.loads(path.read_text("utf-8"))
            for path in folder.glob("process*.json")
        },
    )
