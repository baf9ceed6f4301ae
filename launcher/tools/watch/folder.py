"""The run folder of a watched program: made before it starts, completed after it has ended."""

import dataclasses
import datetime
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from launcher.measure.records import RankSummary, Status, Summary
from launcher.run.record_file import rank_files
from launcher.tools.watch import INSIDE
from launcher.tools.watch.content import held, ledger_record, read_recording
from launcher.util.errors import WHY, refused
from launcher.util.files import replace_text
from launcher.util.processes import signal_name

VARIABLE = "SHARDSCALE_OBSERVER"
# steps left out of tokens/s, as in shardscale_observer/phase_log.py
WARMUP_STEPS = 2
LEDGER_STEPS = (1, 3)  # as the observer has them


def new_folder(out: Path | None, command: Sequence[str], verb: str) -> Path:
    """Make the run folder: `--out`, or runs/TIME-VERB-PROGRAM.

    Raises:
        UserError: it exists, or cannot be made.
    """
    path = out
    if path is None:
        time = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        scripts = [Path(word).stem for word in command if word.endswith(".py")]
        modules = [name for flag, name in pairwise(command) if flag == "-m"]
        stem = f"{time}-{verb}-{[*scripts, *modules, Path(command[0]).stem][0]}"
        names = (stem if n == 1 else f"{stem}-{n}" for n in range(1, 1000))
        path = next(p for p in map(Path("runs").joinpath, names) if not p.exists())
    with (
        refused(OSError, f"--out {path} cannot be made ({WHY}): choose another folder"),
        refused(FileExistsError, f"--out {path} exists already: choose another folder"),
    ):
        path.mkdir(parents=True)
    return path


def observed_environment(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment in which a Python program starts the observer with `settings`."""
    path = os.pathsep.join(filter(None, (str(INSIDE), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, VARIABLE: json.dumps(settings)}


def write_status(folder: Path, status: Status) -> None:
    """Write `status.json`."""
    text = json.dumps(dataclasses.asdict(status), indent=2) + "\n"
    replace_text(folder / "status.json", text)


@dataclass(frozen=True, slots=True)
class WatchedRank:
    """One rank's records, in the order of its file."""

    number: int
    records: list[Mapping[str, Any]]

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        """Return the records of a kind."""
        return [record for record in self.records if record.get("kind") == kind]

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the details of the events of a name."""
        return [e["detail"] for e in self.of_kind("event") if e.get("name") == name]

    @property
    def ended(self) -> Mapping[str, Any]:
        """Return what it has noted at its end; {} where it was killed before."""
        return next(iter(self.events("program_ended")), {})

    @property
    def run(self) -> Mapping[str, Any]:
        """Return the last record that describes the run."""
        return next(iter(self.of_kind("run")[::-1]), {})

    @property
    def label(self) -> str:
        """Return the model, its wrappers and its size."""
        if not self.run.get("parameters") and self.run.get("model") in (None, "unknown"):
            return "no model was called"
        wrapped = f" in {self.run['strategy']}" if self.run.get("strategy") else ""
        return f"{self.run.get('model')}{wrapped}, {self.run.get('parameters') or 0:,} parameters"

    @property
    def on_gpu(self) -> bool:
        """Return True where memory figures are of a GPU."""
        return str(self.run.get("device", "")).startswith("cuda")

    def highest(self, *names: str) -> int | None:
        """Return the highest value of fields over all records."""
        found = [r[name] for r in self.records for name in names if r.get(name) is not None]
        return max(found, default=None)

    @property
    def allocated_peak_bytes(self) -> int | None:
        """Return the most that tensors took on the GPU."""
        return self.highest("allocated_peak_bytes", "peak_bytes")

    @property
    def reserved_peak_bytes(self) -> int | None:
        """Return the most that the allocator held on the GPU."""
        return self.highest("reserved_peak_bytes")


def read_ranks(folder: Path) -> list[WatchedRank]:
    """Read all ranks' records; lines that a killed process has cut short are left out."""
    ranks = []
    for number, path in sorted(rank_files(folder).items()):
        with path.open(encoding="utf-8", errors="replace") as lines:
            ranks.append(WatchedRank(number, [r for r in map(_record, lines) if r]))
    return ranks


def append(folder: Path, rank: WatchedRank, record: Mapping[str, Any]) -> None:
    """Append a record to a rank's file, and to those that were read of it."""
    rank.records.append(record)
    with (folder / f"rank{rank.number}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def complete(folder: Path, code: int) -> tuple[list[WatchedRank], Status, Summary]:
    """Complete the folder of a program that has ended with `code`: ledgers at the peaks of the
    steps whose allocations were recorded, status and summary. Return these, and all ranks."""
    ranks = read_ranks(folder)
    for rank in ranks:
        for step in LEDGER_STEPS:
            recording = read_recording(folder / f"allocations-rank{rank.number}-step{step}")
            if recording is not None:
                append(folder, rank, ledger_record(held(recording).peak, step))
    return ranks, *conclude(folder, ranks, code)


def conclude(folder: Path, ranks: Sequence[WatchedRank], code: int) -> tuple[Status, Summary]:
    """Write and return the status and the summary of a program that has ended with `code`."""
    status, result = _status(ranks, code), summarize(ranks)
    write_status(folder, status)
    values = dataclasses.asdict(result)
    del values["plan"]
    replace_text(folder / "summary.json", json.dumps(values, indent=2) + "\n")
    return status, result


def summarize(ranks: Sequence[WatchedRank]) -> Summary:
    """Return the summary of all ranks; memory is the worst rank's."""
    if not ranks:
        return Summary()
    results = [_rank_summary(rank) for rank in ranks]
    worst = max(results, key=lambda result: result.peak_bytes)
    first = ranks[0]
    steps = first.of_kind("step")
    return Summary(
        strategy=first.run.get("strategy"),
        model=first.run.get("model"),
        world_size=first.run.get("world_size"),
        steps=len(steps),
        tokens_per_s=results[0].tokens_per_s,
        first_step_s=steps[0].get("duration_s") if steps else None,
        peak_bytes=worst.peak_bytes or None,
        peak_kind="allocated on the GPU" if first.on_gpu else "resident set of the process",
        peak_rank=worst.rank,
        duration_s=_duration_s(first),
        ranks=results,
    )


def _rank_summary(rank: WatchedRank) -> RankSummary:
    kind = rank.allocated_peak_bytes if rank.on_gpu else rank.highest("host_rss_bytes")
    steps = rank.of_kind("step")[WARMUP_STEPS:]
    measured: list[list[Any]] = [[s.get(name) for s in steps] for name in ("tokens", "duration_s")]
    known = bool(steps) and all(None not in values for values in measured)
    return RankSummary(
        rank=rank.number,
        peak_bytes=kind or 0,
        traced_peak_bytes=None,
        tokens_per_s=float(sum(measured[0]) / sum(measured[1])) if known else None,
        training_power_w=None,
        samples=None,
    )


def _duration_s(rank: WatchedRank) -> float | None:
    times = [event["unix_s"] for event in rank.of_kind("event")]
    started = rank.run.get("started_unix_s")
    return max(times) - started if times and started is not None else None


def _status(ranks: Sequence[WatchedRank], code: int) -> Status:
    """Return the state of the run; the first rank that reports an error gives the reason."""
    failures = sorted(
        (event["unix_s"], rank.number, event["detail"])
        for rank in ranks
        for event in rank.of_kind("event")
        if event.get("name") == "uncaught"
    )
    if code == 0 or all_seen(ranks):
        return Status(state="completed", phase="end", exit_code=code)
    if code > 0:
        failures += _given_up(ranks, code)
    if failures:
        # out of memory breaks the collectives of other ranks, whose errors may come first
        _, number, detail = next(
            (failure for failure in failures if failure[2]["out_of_memory"]), failures[0]
        )
        return Status(
            state="oom" if detail["out_of_memory"] else "failed",
            phase=detail["phase"],
            reason=detail["error"],
            rank=number,
            exit_code=code,
            detail={"place": detail["place"]},
        )
    reason = f"exit code {code}"
    if code < 0:
        reason = f"ended by {signal_name(-code)}"
    return Status(state="failed", phase="unknown", reason=reason, exit_code=code)


def _given_up(
    ranks: Sequence[WatchedRank], code: int
) -> Iterator[tuple[float, int, dict[str, Any]]]:
    """Yield ranks that caught out of memory and ended without another step, as failures: Hydra, for
    one, turns every error into an exit code."""
    for rank in ranks:
        ends = [r for r in rank.records if {r["kind"], r.get("name")} & {"step", "out_of_memory"}]
        ended = rank.ended and not rank.events("uncaught")
        if ended and ends and ends[-1]["kind"] == "event":
            found, error = ends[-1], f"exit code {code} after out of memory"
            detail = {**found["detail"], "out_of_memory": True, "error": error}
            yield found["unix_s"], rank.number, detail


def all_seen(ranks: Sequence[WatchedRank]) -> bool:
    """Return True if a rehearsal has seen the steps that it was asked for, on every rank."""
    return bool(ranks) and all(rank.ended.get("reason") == "steps" for rank in ranks)


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "kind" in record else None
