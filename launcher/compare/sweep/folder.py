"""A sweep's folder: `sweep.json` with one row per cell, run folders `cells/NAME`, `logs/NAME.txt`.

What a cell has come to since is in `rows/NAME.json`, a row as in sweep.json (see sweep_rows).

    {"schema_version": 1, "nproc": 2, "arguments": [...], "updated_unix_s": ...,
     "cells": [{"name", "flags", "state", "reason", "duration_s", "folder", "log", "figures"}]}

`state` is completed, oom, failed, preempted (as the run's own status.json says), timeout, refused,
unavailable, or pending, running, interrupted. `figures` are taken from the run's summary.json, and
null where there is none.
"""

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from launcher.compare.report.sweep_rows import ROWS, SWEEP_FILE, read_row, read_sweep
from launcher.compare.sweep.cell_process import Ended
from launcher.compare.sweep.grid import Cell
from launcher.errors import ExitCode, UserError
from launcher.run.folder import RunFolder

SCHEMA_VERSION = 1
DONE = ("completed", "oom", "refused", "unavailable")
FIGURES = (
    *("strategy", "model", "world_size", "steps", "test_loss", "perplexity"),
    *("tokens_per_s", "peak_bytes", "peak_kind"),
)


@dataclass(kw_only=True, slots=True)
class Row:
    """One cell and how it stands."""

    cell: Cell
    state: str
    reason: str | None = None
    duration_s: float | None = None
    figures: dict[str, Any] | None = None

    @property
    def done(self) -> bool:
        """Whether another start of the sweep leaves this cell alone."""
        return self.state in DONE

    def as_dict(self) -> dict[str, Any]:
        """The row as it stands in sweep.json."""
        return {
            "name": self.cell.name,
            "flags": self.cell.flags,
            "state": self.state,
            "reason": self.reason,
            "duration_s": self.duration_s,
            "folder": f"cells/{self.cell.name}",
            "log": f"logs/{self.cell.name}.txt",
            "figures": self.figures,
        }

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Self:
        """The row that `as_dict` has written, of a cell that can run."""
        cell = Cell(name=row["name"], flags=row["flags"])
        taken = {key: row[key] for key in ("state", "reason", "duration_s", "figures")}
        return cls(cell=cell, **taken)


class SweepFolder:
    """Where a sweep keeps what it knows."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run_folder(self, name: str) -> Path:
        """Where the cell's run is written."""
        return self.path / "cells" / name

    def log(self, name: str) -> Path:
        """What the cell's processes printed."""
        return self.path / "logs" / f"{name}.txt"

    def read(self) -> dict[str, Any] | None:
        """The content of sweep.json and of its rows; None where no sweep has been.

        Raises:
            UserError: the folder holds something else, or the file cannot be read.
        """
        try:
            return read_sweep(self.path)
        except FileNotFoundError:
            if self.path.is_dir() and not any(self.path.glob("[!.]*")):
                return None
            if self.path.exists():
                raise UserError(
                    f"--out {self.path} exists and is not a sweep's folder: choose another one"
                ) from None
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.path / SWEEP_FILE} cannot be read: {error}") from None

    def read_cell(self, number: int) -> tuple[Row, dict[str, Any]]:
        """The row of cell `number`, from 0 on, and the content of sweep.json.

        Looks at no other cell's file, which its own task may just be replacing.

        Raises:
            UserError: no prepared sweep, or no such cell in it.
        """
        try:
            content = json.loads((self.path / SWEEP_FILE).read_bytes())
            cells = content["cells"]
            if not 0 <= number < len(cells):
                raise UserError(
                    f"--cell {number}: the sweep in {self.path} has {len(cells)} cells, from 0 on"
                )
            row = cells[number]
            with contextlib.suppress(FileNotFoundError):
                row = read_row(self._row_file(row["name"]))
            return Row.from_dict(row), content
        except FileNotFoundError:
            raise UserError(
                f"--out {self.path} holds no sweep: prepare one with sweep --prepare"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.path / SWEEP_FILE} cannot be read: {error}") from None

    def create(self) -> None:
        """Make the folders.

        Raises:
            UserError: they cannot be made there.
        """
        try:
            for name in ("cells", "logs", ROWS):
                (self.path / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {self.path} cannot be made: {error.strerror}") from None

    def write(self, rows: Sequence[Row], *, nproc: int, arguments: Sequence[str]) -> None:
        """Replace sweep.json as a whole, so that no reader sees half of it."""
        content = {
            "schema_version": SCHEMA_VERSION,
            "nproc": nproc,
            "arguments": list(arguments),
            "updated_unix_s": time.time(),
            "cells": [row.as_dict() for row in rows],
        }
        _replace(self.path / SWEEP_FILE, content)

    def write_row(self, row: Row) -> None:
        """Replace the file of one cell, which nobody writes but the process that runs it."""
        _replace(self._row_file(row.cell.name), row.as_dict())

    def move_aside(self, name: str) -> None:
        """Keep what an earlier attempt left, as NAME.attempt1, .attempt2 and so on."""
        attempt = 1
        while (
            self.run_folder(f"{name}.attempt{attempt}").exists()
            or self.log(f"{name}.attempt{attempt}").exists()
        ):
            attempt += 1
        for old, new in (
            (self.run_folder(name), self.run_folder(f"{name}.attempt{attempt}")),
            (self.log(name), self.log(f"{name}.attempt{attempt}")),
        ):
            if old.exists():
                old.rename(new)

    def catch_up(self, row: Row) -> None:
        """What stopped or killed a sweep may have left a cell that ended all the same."""
        if not row.done:
            self.settle(row, None)
        self.write_row(row)

    def settle(self, row: Row, ended: Ended | None) -> None:
        """Read from the run's own folder how the cell ended; `ended` is None when not seen."""
        status = RunFolder(self.run_folder(row.cell.name)).read_status() or {}
        state, phase = status.get("state"), status.get("phase", "start")
        code = ended.exit_code if ended is not None else None
        if ended is not None:
            row.duration_s = ended.duration_s
        row.reason = status.get("reason")
        if state in ("completed", "oom"):
            row.state = state
        elif ended is not None and code is None:
            row.state = "timeout"
            row.reason = (
                f"stopped after {ended.duration_s / 60:.1f} minutes while in {phase}: "
                "give more with --timeout-minutes"
            )
        elif state == "failed" or (state == "preempted" and code in (None, ExitCode.PREEMPTED)):
            row.state = state
        elif (
            ended is not None
        ):  # before it could say so: what `status` says is of an earlier attempt
            row.state = "failed"
            row.reason = self._last_words(row.cell.name) or f"exit code {code}"
        row.figures = self._figures(row.cell.name)

    def _row_file(self, name: str) -> Path:
        return self.path / ROWS / f"{name}.json"

    def _figures(self, name: str) -> dict[str, Any] | None:
        try:
            summary = json.loads((self.run_folder(name) / "summary.json").read_text())
        except FileNotFoundError:
            return None
        return {key: summary.get(key) for key in FIGURES}

    def _last_words(self, name: str) -> str:
        """Why a run ended that had no folder yet: our own sentence, and the exception before it."""
        lines = self.log(name).read_text(encoding="utf-8", errors="replace").splitlines()
        said = [
            line.removeprefix("shardscale: ") for line in lines if line.startswith("shardscale: ")
        ]
        raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        return ": ".join([*said[-1:], *raised[-1:]])


def _replace(path: Path, content: dict[str, Any]) -> None:
    """Write the file as a whole: its readers see what was there before, or all of this."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
    temporary.replace(path)


def rows_of(cells: Sequence[Cell], earlier: dict[str, Any] | None, *, nproc: int) -> list[Row]:
    """One row per cell, with what is known from an earlier start of the same sweep.

    Raises:
        UserError: the earlier sweep had other cells, flags or processes.
    """
    rows = [Row(cell=cell, state=cell.state or "pending", reason=cell.reason) for cell in cells]
    if earlier is None:
        return rows
    if earlier["nproc"] != nproc:
        raise UserError(
            f"this folder's sweep has --nproc {earlier['nproc']}, not {nproc}: choose another --out"
        )
    known = {cell["name"]: cell for cell in earlier["cells"]}
    differences = [
        f"{name} is not asked for now" for name in known.keys() - {c.name for c in cells}
    ]
    for row in rows:
        before = known.get(row.cell.name)
        if before is None:
            differences.append(f"{row.cell.name} is not in it")
            continue
        # Through JSON, as the earlier ones went.
        now = json.loads(json.dumps(row.cell.flags, default=str))
        differences += [
            f"{row.cell.name} has {key} {before['flags'].get(key, 'not set')} there and "
            f"{now.get(key, 'not set')} here"
            for key in sorted(before["flags"].keys() | now.keys())
            if before["flags"].get(key) != now.get(key)
        ]
        if row.state == "pending" and before["state"] != "refused":
            row.state, row.reason = before["state"], before["reason"]
            row.duration_s, row.figures = before["duration_s"], before["figures"]
    if differences:
        shown = "; ".join(differences[:3]) + ("; and more" if len(differences) > 3 else "")
        raise UserError(f"this folder holds another sweep ({shown}): choose another --out")
    return rows
