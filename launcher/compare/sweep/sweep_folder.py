"""A sweep's folder: `sweep.json`, run folders `cells/NAME`, `logs/NAME.txt`, `rows/NAME.json`.

A row file holds a cell's state since sweep.json was written. Tasks of a job array run in parallel
on machines that share only a file system, so each writes only its own cell's file.
"""

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.compare.report.find import ROWS, SWEEP_FILE, read_sweep
from launcher.measure.records import Sweep, SweepRow
from launcher.util.errors import WHY, UserError, naming, refused
from launcher.util.files import check_writable, replace_text
from launcher.util.json_file import strictly


class SweepFolder:
    """Reader and writer of a sweep's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run_folder(self, name: str) -> Path:
        """Return the run folder of a cell."""
        return self.path / "cells" / name

    def log(self, name: str) -> Path:
        """Return the log file of a cell's processes."""
        return self.path / "logs" / f"{name}.txt"

    def read(self) -> Sweep | None:
        """Read sweep.json and the row files; None if the folder holds no sweep.

        Raises:
            UserError: the folder holds something else, or a file cannot be read.
        """
        try:
            return read_sweep(self.path)
        except FileNotFoundError:
            if any(self.path.glob("[!.]*")):
                raise UserError(
                    f"--out {self.path} exists and is not a sweep's folder: choose another one"
                ) from None
            return None
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path / SWEEP_FILE} cannot be read: {error}") from None

    def read_cell(self, number: int) -> tuple[SweepRow, Sweep]:
        """Read the row of cell `number`, counted from 0, and sweep.json.

        Reads no other cell's file, which that cell's task may be replacing.

        Raises:
            UserError: no prepared sweep, or no such cell in it.
        """
        try:
            sweep = strictly(Sweep, (self.path / SWEEP_FILE).read_text(encoding="utf-8"))
            if not 0 <= number < len(sweep.cells):
                raise UserError(
                    f"--cell {number}: the sweep in {self.path} has {len(sweep.cells)} cells, "
                    "counted from 0"
                )
            row = sweep.cells[number]
            with contextlib.suppress(FileNotFoundError):
                row = strictly(SweepRow, self._row_file(row).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(
                f"--out {self.path} holds no sweep: prepare one with sweep --prepare"
            ) from None
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path / SWEEP_FILE} cannot be read: {error}") from None
        return row, sweep

    def check(self) -> None:
        """Refuse a folder that cannot be written, before any work.

        Raises:
            UserError: the folder cannot be written.
        """
        with naming("--out"):
            check_writable(self.path)

    def create(self) -> None:
        """Create the folders.

        Raises:
            UserError: they cannot be created.
        """
        with refused(OSError, f"--out {self.path} cannot be made: {WHY}"):
            for name in ("cells", "logs", ROWS):
                (self.path / name).mkdir(parents=True, exist_ok=True)

    def write(self, sweep: Sweep) -> None:
        """Replace sweep.json atomically."""
        sweep.updated_unix_s = time.time()
        _replace(self.path / SWEEP_FILE, asdict(sweep))

    def write_row(self, row: SweepRow) -> None:
        """Replace the file of one cell; only the process that runs the cell writes it."""
        _replace(self._row_file(row), asdict(row))

    def move_aside(self, name: str) -> None:
        """Rename an earlier attempt to NAME.attempt1, .attempt2 and so on."""
        attempt = 1
        while (
            self.run_folder(f"{name}.attempt{attempt}").exists()
            or self.log(f"{name}.attempt{attempt}").exists()
        ):
            attempt += 1
        for place in (self.run_folder, self.log):
            if place(name).exists():
                place(name).rename(place(f"{name}.attempt{attempt}"))

    def _row_file(self, row: SweepRow) -> Path:
        return self.path / ROWS / f"{row.name}.json"


def _replace(path: Path, content: dict[str, Any]) -> None:
    with refused(OSError, f"{path} cannot be written ({WHY}): make room, and continue the sweep"):
        replace_text(path, json.dumps(content, indent=2, default=str) + "\n")


def merge_earlier(rows: Sequence[SweepRow], earlier: Sweep, *, nproc: int) -> None:
    """Copy the results of an earlier start of the same sweep into its rows.

    Raises:
        UserError: the earlier sweep had other cells, flags or processes.
    """
    if earlier.nproc != nproc:
        raise UserError(
            f"this folder's sweep has --nproc {earlier.nproc}, not {nproc}: choose another --out"
        )
    known = {row.name: row for row in earlier.cells}
    own = ("refused", "unavailable")  # known before any cell runs
    differences = [
        f"{name} is no longer in the grid" for name in known.keys() - {row.name for row in rows}
    ]
    for row in rows:
        before = known.get(row.name)
        if before is None:
            differences.append(f"{row.name} is not in it")
            continue
        # Through JSON, like the stored flags.
        now = json.loads(json.dumps(row.flags, default=str))
        differences += [
            f"{row.name} has {key} {before.flags.get(key, 'not set')} there and "
            f"{now.get(key, 'not set')} here"
            for key in sorted(before.flags.keys() | now.keys())
            if before.flags.get(key) != now.get(key)
        ]
        if row.state not in own and before.state not in own:
            row.state, row.reason = before.state, before.reason
            row.duration_s, row.figures = before.duration_s, before.figures
    if differences:
        shown = "; ".join(differences[:3]) + ("; and more" if len(differences) > 3 else "")
        raise UserError(f"this folder holds another sweep ({shown}): choose another --out")
