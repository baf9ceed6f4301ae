"""`shardscale sweep`: one run per cell of a grid, one after the other, whatever becomes of each.

python -m launcher sweep --nproc 4 --model gpt2 --grid strategy=ddp,fsdp,zero3+cpu micro_batch=8,16
"""

import argparse
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from launcher.compare.report.cli import report_sweep
from launcher.compare.sweep.array import prepare, run_task
from launcher.compare.sweep.cell import run_cell, stop_in_order
from launcher.compare.sweep.display import SweepDisplay, outcome
from launcher.compare.sweep.folder import Row, SweepFolder, rows_of
from launcher.compare.sweep.grid import Cell, cells_of, flags_given, open_corpora
from launcher.compare.sweep.options import default_folder, grid_of, parse_options
from launcher.errors import ExitCode, UserError
from launcher.run.lifecycle import Interrupted
from launcher.startup import require_own_package


def main(argv: Sequence[str]) -> int:
    """Run or continue a sweep; 0 when every cell has a row, whatever the row says.

    Exit codes: 2 refused, 5 interrupted (the same command continues it).
    """
    try:
        options, training = parse_options(argv)
        if options.prepare:
            return _prepare(argv)
        if options.cell is not None:
            return run_task(options, argv)
        return _sweep(options, training, argv)
    except UserError as error:
        print(f"shardscale: {error}", file=sys.stderr)
        return ExitCode.REFUSED
    except KeyboardInterrupt:  # before the first cell, with nothing to save
        print("shardscale: stopped before the first cell", file=sys.stderr)
        return ExitCode.PREEMPTED


def _prepare(argv: Sequence[str]) -> int:
    prepared = prepare([token for token in argv if token != "--prepare"])
    prepared.write()
    path = prepared.folder.path
    print(f"sweep of {len(prepared.rows)} cells in {path}: run each of {prepared.tasks()} with")
    print(f"python -m launcher sweep --out {shlex.quote(str(path))} --cell NUMBER")
    return ExitCode.DONE


def _sweep(options: argparse.Namespace, training: list[str], argv: Sequence[str]) -> int:
    require_own_package()
    out: Path = options.out or default_folder()
    folder = SweepFolder(out)
    earlier = folder.read()
    timeout_s = 60 * options.timeout_minutes
    if earlier is not None and not options.grid and not options.grid_file:
        if training or options.nproc:
            raise UserError(
                f"{out} goes on with its own grid and flags: to continue, give only --out and "
                "--timeout-minutes"
            )
        argv = earlier["arguments"]
        options, training = parse_options(argv)
    nproc: int = options.nproc or max(1, torch.cuda.device_count())
    typed, configured = flags_given(training)
    cells = cells_of(grid_of(options, configured), typed, nproc=nproc)
    rows = rows_of(cells, earlier, nproc=nproc)
    rows = _with_data(rows, nproc)
    folder.create()
    lock = FileLock(out / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(
            f"another sweep is running in {out}: wait for it, or choose --out"
        ) from None
    with lock:
        return _Sweep(folder, rows, nproc=nproc, timeout_s=timeout_s, arguments=argv).run()


def _with_data(rows: list[Row], nproc: int) -> list[Row]:
    """Open the corpora of the cells that will run; rows whose data cannot be read are refused."""
    to_run = [row.cell for row in rows if not row.done]
    checked: dict[str, Cell] = {}
    if to_run:
        checked = {cell.name: cell for cell in open_corpora(to_run, nproc=nproc)}
    for row in rows:
        cell = checked.get(row.cell.name, row.cell)
        if cell.state is not None:
            row.cell, row.state, row.reason = cell, cell.state, cell.reason
    return rows


class _Sweep:
    """The loop over cells."""

    def __init__(
        self,
        folder: SweepFolder,
        rows: list[Row],
        *,
        nproc: int,
        timeout_s: float,
        arguments: Sequence[str],
    ) -> None:
        self._folder = folder
        self._rows = rows
        self._nproc = nproc
        self._timeout_s = timeout_s
        self._arguments = arguments
        self._display = SweepDisplay(rows, folder)
        self._has_run = False

    def run(self) -> int:
        """Bring every row to an end; an exit code."""
        self._display.line(
            f"sweep of {len(self._rows)} cells, {self._nproc} process"
            f"{'es' if self._nproc > 1 else ''} each, in {self._folder.path}"
        )
        stop_in_order()
        try:
            with self._display:
                self._write()
                for row in self._rows:
                    self._one(row)
            if self._has_run:
                self._report()
        except Interrupted as stopped:
            self._display.line(
                f"shardscale: {stopped}; what is done is kept, continue with: "
                f"python -m launcher sweep --out {self._folder.path}"
            )
            return ExitCode.PREEMPTED
        self._close()
        return ExitCode.DONE

    def _one(self, row: Row) -> None:
        self._folder.catch_up(row)
        if row.done:
            self._display.kept(row)
            return
        self._has_run = True
        self._display.started(row)
        started_s = time.monotonic()
        try:
            run_cell(
                row,
                self._folder,
                nproc=self._nproc,
                timeout_s=self._timeout_s,
                tick=lambda: self._display.elapsed(time.monotonic() - started_s),
            )
        finally:
            self._write()
        self._display.finished(row)

    def _write(self) -> None:
        self._folder.write(self._rows, nproc=self._nproc, arguments=self._arguments)

    def _report(self) -> None:
        try:
            report_sweep(self._folder.path)
        except Exception as error:  # the cells are done, whatever a report makes of them
            reason = (str(error) or type(error).__name__).splitlines()[0]
            self._display.line(f"shardscale: no report could be made of this sweep: {reason}")

    def _close(self) -> None:
        for row in self._rows:
            if row.state in ("failed", "timeout"):
                log = self._folder.log(row.cell.name)
                self._display.line(f"{row.cell.name}: {outcome(row)} (see {log})")
        counts = Counter(row.state for row in self._rows)
        states = ", ".join(f"{count} {state}" for state, count in counts.items())
        self._display.line(f"{len(self._rows)} cells: {states}; in {self._folder.path}")
