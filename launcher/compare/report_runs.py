"""Reads one run folder into memory; whatever is missing or damaged is None and noted."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from launcher.compare.report_find import FoundRun
from launcher.compare.report_steps import STEP_PREFIX, StepSeries, read_steps
from launcher.compare.report_timeline import Timeline, timeline
from launcher.errors import one_line
from launcher.measure.records import well_formed

_RANK_FILE = re.compile(r"rank(\d+)\.jsonl")


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
    status = _mapping(path / "status.json", notes)
    config = _mapping(path / "config.yaml", notes)
    records: list[tuple[int, dict[str, Any]]] = []
    steps: StepSeries | None = None
    for rank, file in sorted(_rank_files(path)) if has_folder else []:
        text = _text(file, notes)
        records += [(rank, record) for record in _other_records(text, file.name, notes)]
        if rank == 0:
            steps, damaged = read_steps(text)
            if damaged:
                notes.append(f"{file.name}: {damaged} unreadable step line(s) left out")
    record = next((r for _, r in records if r["kind"] == "run"), None)
    reason = status.get("reason")
    if reason is None and status.get("state") not in (None, "completed", "running"):
        reason = _mapping(path / "failure.json", notes).get("message")
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
        environment=_mapping(path / "environment.json", notes),
        record=_record_of_config(config) if record is None else record,
        summary=_mapping(path / "summary.json", notes),
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
    if isinstance(at_failure, dict):
        ledgers.append((status.get("rank") or 0, at_failure))
    return [(rank, ledger) for rank, ledger in ledgers if isinstance(ledger.get("device"), dict)]


def _rank_files(path: Path) -> list[tuple[int, Path]]:
    found = [(_RANK_FILE.fullmatch(entry.name), entry) for entry in path.iterdir()]
    return [(int(match[1]), entry) for match, entry in found if match]


def _timelines(records: list[tuple[int, dict[str, Any]]]) -> list[Timeline]:
    by_rank: dict[int, list[dict[str, Any]]] = {}
    for rank, record in records:
        if record["kind"] == "gpu" and isinstance(record.get("t_s"), int | float):
            by_rank.setdefault(rank, []).append(record)
    return [timeline(rank, samples) for rank, samples in by_rank.items()]


def _other_records(text: str, name: str, notes: list[str]) -> list[dict[str, Any]]:
    """Every record that is not a step's."""
    prefix = STEP_PREFIX.decode()
    records, damaged = [], 0
    for line in text.split("\n"):
        if not line or line.startswith(prefix):
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if well_formed(record):
            records.append(record)
        else:
            damaged += 1
    if damaged:
        notes.append(f"{name}: {damaged} unreadable line(s) left out")
    return records


def _text(file: Path, notes: list[str]) -> str:
    try:
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


def _record_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a run that died before its first record can still say about itself."""
    strategy = config.get("strategy")
    label = f"zero{config['zero']}" if strategy == "zero" and "zero" in config else strategy
    same = ("model", "precision", "micro_batch", "global_batch", "seq_len", "steps", "device")
    return {"strategy": label, **{name: config.get(name) for name in same}}
