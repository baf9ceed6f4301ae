"""Reads one run folder into memory; whatever is missing or damaged is None and noted."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from launcher.compare.report.find import FoundRun
from launcher.compare.report.records import fits, sound_fields, sound_record
from launcher.compare.report.steps import STEP_PREFIX, StepSeries, read_steps
from launcher.compare.report.timeline import Timeline, timeline
from launcher.errors import one_line
from launcher.memory.ledger import Ledger

_RANK_FILE = re.compile(r"rank(\d+)\.jsonl")
_PLAIN = str | int | float
# What is read of each file: the rest may be anything.
_STATUS = {"state": str, "phase": str, "reason": str, "rank": int, "detail": dict}
_SUMMARY: dict[str, type] = {
    **dict.fromkeys(("tokens_per_s", "perplexity", "test_loss", "duration_s"), float),
    **{"world_size": int, "peak_bytes": int, "peak_kind": str},
}
_ENVIRONMENT = {"python": str, "git": str, "packages": dict}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run folder. `record` is its `run` record, or what the config says in its place.

    A cell of a sweep that has no folder is a run of which only the state and reason are known.
    `ledgers` are (rank, ledger record), `phases` the phase records of all ranks, both as written.
    """

    name: str
    path: Path | None
    state: str
    phase: str | None
    reason: str | None
    failed_rank: int | None
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    record: Mapping[str, Any]
    summary: Mapping[str, Any]
    steps: StepSeries | None
    ledgers: Sequence[tuple[int, Mapping[str, Any]]]
    phases: Sequence[tuple[int, Mapping[str, Any]]]
    timelines: Sequence[Timeline]
    notes: Sequence[str]

    @property
    def completed(self) -> bool:
        """Whether its figures may win anything."""
        return self.state == "completed"

    @property
    def on_gpu(self) -> bool:
        """Whether memory figures are a GPU's."""
        return str(self.record.get("device", "")).startswith("cuda")


def load_run(name: str, found: FoundRun) -> Run:
    """Read a run folder, and let its sweep say how it ended where the folder cannot know."""
    path, cell, notes = found.path, found.cell, list(found.notes)
    has_folder = path.is_dir()
    status = _fields(path / "status.json", _STATUS, notes)
    config = _config(path / "config.yaml", notes)
    records: list[tuple[int, dict[str, Any]]] = []
    steps: StepSeries | None = None
    for rank, file in sorted(_rank_files(path)) if has_folder else []:
        text = _text(file, notes)
        others, damaged = _other_records(text)
        records += [(rank, record) for record in others]
        if rank == 0:
            steps, damaged_steps = read_steps(text)
            damaged += damaged_steps
        if damaged:
            lines = "1 damaged line" if damaged == 1 else f"{damaged} damaged lines"
            notes.append(f"{file.name}: {lines} left out")
    record = next((r for _, r in records if r["kind"] == "run"), None)
    reason = status.get("reason")
    if reason is None and status.get("state") not in (None, "completed", "running"):
        reason = _fields(path / "failure.json", _STATUS, notes).get("reason")
    state = str(status.get("state", "unknown"))
    if cell is not None and cell.overrules(state):
        state, reason = cell.state, cell.reason or reason
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
        summary=_fields(path / "summary.json", _SUMMARY, notes),
        steps=steps,
        ledgers=_ledgers(records, status),
        phases=[(rank, r) for rank, r in records if r["kind"] == "phase"],
        timelines=_timelines(records),
        notes=notes,
    )


def unreadable_run(name: str, found: FoundRun, error: Exception) -> Run:
    """In the place of a run whose files hold what no run writes."""
    reason = f"its files are damaged ({type(error).__name__}: {one_line(str(error), 80)})"
    nothing: dict[str, Any] = {}
    return Run(
        name=name,
        path=found.path,
        state="unknown",
        phase=None,
        reason=reason,
        failed_rank=None,
        config=nothing,
        environment=nothing,
        record=nothing,
        summary=nothing,
        steps=None,
        ledgers=[],
        phases=[],
        timelines=[],
        notes=[*found.notes, reason],
    )


def _ledgers(
    records: list[tuple[int, dict[str, Any]]], status: Mapping[str, Any]
) -> list[tuple[int, Mapping[str, Any]]]:
    """Those written, and the one taken when memory ran out, which only the status has."""
    ledgers: list[tuple[int, Mapping[str, Any]]] = [
        (rank, record) for rank, record in records if record["kind"] == "ledger"
    ]
    detail = status.get("detail")
    at_failure = detail.get("ledger") if isinstance(detail, dict) else None
    if isinstance(at_failure, dict) and fits(at_failure, Ledger):
        ledgers.append((status.get("rank") or 0, at_failure))
    return ledgers


def _rank_files(path: Path) -> list[tuple[int, Path]]:
    found = [(_RANK_FILE.fullmatch(entry.name), entry) for entry in path.iterdir()]
    return [(int(match[1]), entry) for match, entry in found if match]


def _timelines(records: list[tuple[int, dict[str, Any]]]) -> list[Timeline]:
    by_rank: dict[int, list[dict[str, Any]]] = {}
    for rank, record in records:
        if record["kind"] == "gpu" and record.get("t_s") is not None:
            by_rank.setdefault(rank, []).append(record)
    return [timeline(rank, samples) for rank, samples in by_rank.items()]


def _other_records(text: str) -> tuple[list[dict[str, Any]], int]:
    """Every record that is not a step's, and how many lines were damaged."""
    prefix = STEP_PREFIX.decode()
    lines = [line for line in text.split("\n") if line and not line.startswith(prefix)]
    found = [record for record in map(sound_record, lines) if record is not None]
    return found, len(lines) - len(found)


def _text(file: Path, notes: list[str]) -> str:
    try:
        if not file.is_file():
            raise OSError(0, "not a file")
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        notes.append(f"{file.name}: cannot be read ({error.strerror})")
        return ""


def _mapping(file: Path, notes: list[str]) -> dict[str, Any]:
    """The file's content; empty when it is not there, and noted when it is no mapping."""
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
    """What the schema names of a file; a value of another type is left out and noted."""
    content = _mapping(file, notes)
    kept = sound_fields(content, schema)
    _note_left_out(file, [name for name in schema if content.get(name) is not None], kept, notes)
    return kept


def _config(file: Path, notes: list[str]) -> dict[str, Any]:
    """The plain values, and lists of them, of a config."""
    content = {str(name): value for name, value in _mapping(file, notes).items()}
    kept = {
        name: value
        for name, value in content.items()
        if all(
            part is None or fits(part, bool | _PLAIN)
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
    """What a run that died before its first record can still say about itself."""
    of_text = dict.fromkeys(("model", "precision", "device", "strategy"), str)
    of_number = dict.fromkeys(("micro_batch", "global_batch", "seq_len", "steps", "zero"), int)
    known = sound_fields(config, of_text | of_number)
    zero = known.pop("zero", None)
    if known.get("strategy") == "zero" and zero is not None:
        known["strategy"] = f"zero{zero}"
    return known
