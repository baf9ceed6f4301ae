"""Read one run folder; missing or damaged content becomes None, with a note."""

import json
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from launcher.compare.report.find import FoundRun
from launcher.compare.report.records import fits, is_a, sound_fields, sound_record
from launcher.compare.report.series import (
    STEP_PREFIX,
    DeviceSamples,
    StepSeries,
    read_steps,
    timeline,
)
from launcher.measure.records import GpuRecord, Status, Summary, SweepRow
from launcher.run.record_file import rank_files
from launcher.strategies import VARIANTS
from launcher.strategies.ledger import Ledger
from launcher.util.errors import one_line
from launcher.util.files import FolderLock

_LOST = "lost"
"""State of a run whose status is "running" and whose process is gone: its agent, which would have
written the end, was killed with it."""
# Fields read from each file; others are ignored.
_STATUS = typing.get_type_hints(Status)
_SUMMARY = typing.get_type_hints(Summary)
OfRank = tuple[int, Mapping[str, Any]]
_ENVIRONMENT = {"python": str, "git": str, "packages": dict}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run. `record` is its `run` record, or the equivalent from its config.

    A sweep's cell without a folder has only a state and a reason. `ledgers` and `phases` are
    (rank, record) of all ranks, as written.
    """

    name: str
    path: Path | None
    state: str
    reason: str | None
    notes: Sequence[str]
    phase: str | None = None
    failed_rank: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    summary: Summary = field(default_factory=Summary)
    steps: StepSeries | None = None
    ledgers: Sequence[OfRank] = ()
    phases: Sequence[OfRank] = ()
    timelines: Sequence[DeviceSamples] = ()

    @property
    def completed(self) -> bool:
        """Return True if its figures are complete, so that it can win a goal."""
        return self.state == "completed"

    @property
    def on_gpu(self) -> bool:
        """Return True if memory figures are of a GPU."""
        return str(self.record.get("device", "")).startswith("cuda")


def load_run(name: str, found: FoundRun) -> Run:
    """Read a run folder; its sweep's row tells how it ended if the folder cannot."""
    path, cell, notes = found.path, found.cell, list(found.notes)
    has_folder = path.is_dir()
    status = _fields(path / "status.json", _STATUS, notes)
    config = _config(path / "config.yaml", notes)
    records, steps, timelines = _read_ranks(path, notes) if has_folder else ([], None, [])
    record = _newest_description(records)
    reason = status.get("reason")
    if reason is None and status.get("state") not in (None, "completed", "running"):
        reason = _fields(path / "failure.json", _STATUS, notes).get("reason")
    state = str(status.get("state", "unknown"))
    if cell is not None and _overrides(cell, state):
        state, reason = cell.state, cell.reason or reason
    if state == "running" and (process := FolderLock(path).left_by()) is not None:
        state, reason = _LOST, f"{process} ended before it could write why: go on with --resume"
    return Run(
        name=name,
        path=path if has_folder else None,
        state=state,
        phase=status.get("phase"),
        reason=None if reason is None else str(reason),
        failed_rank=status.get("rank"),
        config=config,
        environment=_fields(path / "environment.json", _ENVIRONMENT, notes),
        record=_record_of_config(config) if record is None else record,
        summary=Summary.of(_fields(path / "summary.json", _SUMMARY, notes)),
        steps=steps,
        ledgers=_ledgers(records, status),
        phases=[(rank, r) for rank, r in records if r["kind"] == "phase"],
        timelines=timelines,
        notes=notes,
    )


def _overrides(cell: SweepRow, state: str) -> bool:
    # A killed run cannot write its end into status.json, whose state is then `state`.
    return (
        cell.state in ("timeout", "interrupted")
        or state == "unknown"
        or (state == "running" and cell.state not in ("running", "pending"))
    )


def unreadable_run(name: str, found: FoundRun, error: Exception) -> Run:
    """Return a placeholder for a run whose files are damaged."""
    reason = f"its files are damaged ({type(error).__name__}: {one_line(str(error), 80)})"
    notes = [*found.notes, reason]
    return Run(name=name, path=found.path, state="unknown", reason=reason, notes=notes)


def _read_ranks(
    path: Path, notes: list[str]
) -> tuple[list[OfRank], StepSeries | None, list[DeviceSamples]]:
    """Read the records of all ranks: the steps of rank 0, each rank's samples, and the others."""
    records: list[OfRank] = []
    steps: StepSeries | None = None
    timelines: list[DeviceSamples] = []
    for rank, file in sorted(rank_files(path).items()):
        text = _text(file, notes)
        lines = [line for line in text.split("\n") if line and not line.startswith(STEP_PREFIX)]
        others = [record for record in map(sound_record, lines) if record is not None]
        records += [(rank, record) for record in others if record["kind"] != GpuRecord.kind]
        timelines += _timeline(rank, others)
        damaged = len(lines) - len(others)
        if rank == 0:
            steps, damaged_steps = read_steps(text)
            damaged += damaged_steps
        if damaged:
            lines_ = "1 damaged line" if damaged == 1 else f"{damaged} damaged lines"
            notes.append(f"{file.name}: {lines_} left out")
    return records, steps, timelines


def _newest_description(records: Sequence[OfRank]) -> Mapping[str, Any] | None:
    """Return the record of the lowest rank that describes the newest start, as config.yaml and
    summary.json do: a run may be resumed on other ranks."""
    # a watched program may begin with something small, and describes itself again
    found = [(rank, record) for rank, record in records if record["kind"] == "run"]
    return next((record for rank, record in reversed(found) if rank == found[0][0]), None)


def _ledgers(records: Sequence[OfRank], status: Mapping[str, Any]) -> list[OfRank]:
    """Return the ledgers written, and the one of an out-of-memory error, from status.json."""
    ledgers = [(rank, record) for rank, record in records if record["kind"] == "ledger"]
    detail = status.get("detail")
    at_failure = detail.get("ledger") if isinstance(detail, dict) else None
    if isinstance(at_failure, dict) and fits(at_failure, Ledger):
        ledgers.append((status.get("rank") or 0, at_failure))
    return ledgers


def _timeline(rank: int, records: Sequence[Mapping[str, Any]]) -> Iterator[DeviceSamples]:
    """Aggregate a rank's samples, if any, those of several starts one after the other. A week has
    600,000, so those of one rank alone are held."""
    samples: list[Mapping[str, Any]] = []
    before_s, last_s = 0.0, 0.0
    for record in records:
        if record["kind"] == GpuRecord.kind and record.get("t_s") is not None:
            t_s = float(record["t_s"])
            if t_s < last_s:  # each start counts from 0
                before_s += last_s
            samples.append({**record, "t_s": before_s + t_s})
            last_s = t_s
    if samples:
        yield timeline(rank, samples)


def _text(file: Path, notes: list[str]) -> str:
    try:
        if not file.is_file():  # reading a FIFO or a device may never end
            raise OSError(0, "not a file")
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        notes.append(f"{file.name}: cannot be read ({error.strerror})")
        return ""


def _mapping(file: Path, notes: list[str]) -> dict[str, Any]:
    """Read a file; empty if missing, and noted if it is not a mapping."""
    if not file.exists():
        return {}
    text = _text(file, notes)
    try:
        content = yaml.safe_load(text) if file.suffix == ".yaml" else json.loads(text)
    except (ValueError, RecursionError, yaml.YAMLError):
        content = None
    if not isinstance(content, dict):
        notes.append(f"{file.name}: damaged, left out")
        return {}
    return content


def _fields(file: Path, schema: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Read the schema's fields of a file; values of other types are left out and noted."""
    content = _mapping(file, notes)
    kept = sound_fields(content, schema)
    _note_left_out(file, [name for name in schema if content.get(name) is not None], kept, notes)
    return kept


def _config(file: Path, notes: list[str]) -> dict[str, Any]:
    """Read the plain values of a config, and lists of them."""
    content = {str(name): value for name, value in _mapping(file, notes).items()}
    kept = {
        name: value
        for name, value in content.items()
        if all(
            part is None or is_a(part, bool | str | int | float)
            for part in (value if isinstance(value, list) else [value])
        )
    }
    _note_left_out(file, content, kept, notes)
    return kept


def _note_left_out(
    file: Path, names: Iterable[str], kept: Mapping[str, Any], notes: list[str]
) -> None:
    damaged = [name for name in names if name not in kept]
    if damaged:
        notes.append(f"{file.name}: {', '.join(damaged)} damaged, left out")


def _record_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Build the record of a run that died before writing one, from its config."""
    of_text = dict.fromkeys(("model", "precision", "device", "strategy"), str)
    of_number = dict.fromkeys(("micro_batch", "global_batch", "seq_len", "steps", "replicate"), int)
    known = sound_fields(config, of_text | of_number)
    replicates = known.pop("replicate", 1) > 1
    for variant in VARIANTS.values():  # the last match is the most specific
        if variant.replicates == replicates and variant.fields.items() <= config.items():
            known["strategy"] = variant.label
    return known
