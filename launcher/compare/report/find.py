"""Find the runs of a report: run folders, and cells of sweeps with or without a folder."""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.measure.records import Sweep, SweepRow
from launcher.util.errors import UserError
from launcher.util.json_file import strictly

MARKS = ("config.yaml", "status.json", "rank0.jsonl")
SWEEP_FILE = "sweep.json"
ROWS = "rows"
_ATTEMPT = re.compile(r"(?<=.)\.attempt\d+$")


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundRun:
    """A run folder, which may be missing if a sweep lists the cell, and notes on it."""

    path: Path
    cell: SweepRow | None = None
    notes: list[str] = field(default_factory=list)


def find_runs(patterns: Sequence[str]) -> dict[str, FoundRun]:
    """Find runs in folders, inside folders and by globs; returns unique name -> run.

    Raises:
        UserError: a path without runs.
    """
    found: dict[Path, FoundRun] = {}
    for pattern in patterns:
        matched = [Path(pattern)] if os.path.exists(pattern) else _glob(pattern)
        inside = [run for path in matched for run in _found_in(path)]
        if not inside:
            raise UserError(
                f"{pattern}: no run in it (a run folder holds {MARKS[0]} and {MARKS[2]}): give a "
                "run folder or a folder of run folders"
            )
        for run in inside:
            path = run.path.resolve()
            # found as a folder and as a sweep's cell: the cell's row knows more
            if path not in found or run.cell is not None:
                found[path] = FoundRun(path=path, cell=run.cell, notes=run.notes)
    names = unique_tails(found)
    return {names[path]: run for path, run in found.items()}


def _glob(pattern: str) -> list[Path]:
    matched = sorted(map(Path, glob.glob(pattern, recursive=True)))
    if not matched:
        raise UserError(f"{pattern}: there is no such folder; give run folders, or check the path")
    return matched


def _found_in(path: Path) -> list[FoundRun]:
    found: dict[Path, FoundRun] = {}
    damaged: set[Path] = set()
    for name, inside, files in os.walk(path):
        inside.sort()  # a cell before its attempts, which are noted on it
        folder = Path(name)
        if any(mark in files for mark in MARKS):
            inside.clear()  # a run folder contains no further runs
            cell = folder.with_name(_ATTEMPT.sub("", folder.name)) if folder.name else folder
            if cell not in found:
                found[folder] = FoundRun(path=folder)
                if not damaged.isdisjoint(cell.parents):
                    found[folder].notes.append(f"{SWEEP_FILE}: damaged, left out")
            elif cell != folder:
                found[cell].notes.append(f"{folder.name} holds an earlier attempt, not shown")
        elif SWEEP_FILE in files:
            try:
                rows = read_sweep(folder).cells
            except (OSError, ValueError):
                damaged.add(folder)
                continue
            for row in rows:
                found[folder / row.folder] = FoundRun(path=folder / row.folder, cell=row)
        # A run may lie on another disk; a link to anything else is not walked, and may be a loop.
        for link in (folder / name for name in inside if (folder / name).is_symlink()):
            if any(os.path.isfile(link / mark) for mark in MARKS):
                found.setdefault(link, FoundRun(path=link))
    return list(found.values())


def read_sweep(path: Path) -> Sweep:
    """Read sweep.json, with each cell's row from its own file if there is one.

    Raises:
        OSError, ValueError: a file is missing, damaged or not of a sweep.
    """
    sweep = strictly(Sweep, (path / SWEEP_FILE).read_text(encoding="utf-8"))
    # Listed instead of opened one by one: NFS caches a missing name for up to a minute.
    known = {file.stem: file for file in (path / ROWS).glob("[!.]*.json")}
    sweep.cells = [
        strictly(SweepRow, known[row.name].read_text(encoding="utf-8"))
        if row.name in known
        else row
        for row in sweep.cells
    ]
    return sweep


def unique_tails(paths: Iterable[Path]) -> dict[Path, str]:
    """Return the shortest tail of each path that is unique among them."""
    paths = list(paths)
    # counted once: a sweep may have thousands of cells
    counts = Counter(path.parts[-n:] for path in paths for n in range(1, len(path.parts) + 1))
    tails: dict[Path, str] = {}
    for path in paths:
        ends = (path.parts[-length:] for length in range(1, len(path.parts) + 1))
        tails[path] = "/".join(next((end for end in ends if counts[end] == 1), path.parts))
    return tails
