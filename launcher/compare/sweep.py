"""`memscale sweep`: one run per cell of a grid, one after the other, whatever becomes of each.

python -m launcher sweep --nproc 4 --model gpt2 --grid strategy=ddp,fsdp,zero3+cpu micro_batch=8,16
"""

import argparse
import datetime
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
from filelock import FileLock, Timeout

from launcher.compare.cell_process import run_to_end
from launcher.compare.grid import Cell, cells_of, flags_given, open_corpora
from launcher.compare.grid_source import SHIPPED, Grid, Values, flags_of, parse_axes, read_grid_file
from launcher.compare.report import report_sweep
from launcher.compare.sweep_display import SweepDisplay, outcome
from launcher.compare.sweep_folder import Row, SweepFolder, rows_of
from launcher.errors import ExitCode, UserError
from launcher.lifecycle import Interrupted


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument "))


def main(argv: Sequence[str]) -> int:
    """Run or continue a sweep; 0 when every cell has a row, whatever the row says.

    Exit codes: 2 refused, 5 interrupted (the same command continues it).
    """
    try:
        options, training = _parse(argv)
        return _sweep(options, training, argv)
    except UserError as error:
        print(f"memscale: {error}", file=sys.stderr)
        return ExitCode.REFUSED
    except KeyboardInterrupt:  # before the first cell, with nothing to save
        print("memscale: stopped before the first cell", file=sys.stderr)
        return ExitCode.PREEMPTED


def _parser() -> _Parser:
    shipped = ", ".join(sorted(path.stem for path in SHIPPED.glob("*.yaml")))
    parser = _Parser(
        prog="memscale sweep",
        description="One training run per combination of the grid's values, one after the other, "
        "each in processes of its own. A cell that runs out of memory, fails or times out is a "
        "row like any other. Started again on the same --out, it runs what is not done.",
        epilog="Every other flag is launcher.train's and applies to all cells: --model gpt2 "
        "--steps 50. See `memscale train --help`.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nproc", type=int, help="processes of each cell (default: one per GPU, at least 1)")
    add(
        *("--grid",),
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE,VALUE",
        help="what to vary, by the names of launcher.train's flags; strategy also takes zero0 to "
        "zero3, fsdp-grad-op, fsdp-hybrid, and +cpu behind a name for offload",
    )
    add("--grid-file", metavar="FILE", help=f"a YAML grid, or a shipped one: {shipped}")
    add("--out", type=Path, help="the sweep's folder (default: sweeps/TIME)")
    add(
        *("--timeout-minutes",),
        type=float,
        default=60.0,
        help="a cell that takes longer is stopped (default: 60)",
    )
    return parser


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    # Both spellings are accepted, as everywhere.
    dashed = [
        token if not token.startswith("--") else name.replace("_", "-") + equals + value
        for token in argv
        for name, equals, value in [token.partition("=")]
    ]
    options, training = _parser().parse_known_args(dashed)
    if options.nproc is not None and options.nproc < 1:
        raise UserError(f"--nproc {options.nproc} must be 1 or more")
    if not options.timeout_minutes > 0:
        raise UserError(f"--timeout-minutes {options.timeout_minutes} must be more than 0")
    return options, training


def _sweep(options: argparse.Namespace, training: list[str], argv: Sequence[str]) -> int:
    out: Path = options.out or _default_folder()
    folder = SweepFolder(out)
    earlier = folder.read()
    timeout_s = 60 * options.timeout_minutes
    if not options.grid and not options.grid_file:
        if earlier is None:
            raise UserError(
                "nothing to compare: give --grid strategy=ddp,zero2 or --grid-file sharding"
            )
        if training or options.nproc:
            raise UserError(
                f"{out} is continued with the grid and flags it has: leave out all but --out and "
                "--timeout-minutes"
            )
        argv = earlier["arguments"]
        options, training = _parse(argv)
    nproc: int = options.nproc or max(1, torch.cuda.device_count())
    typed, configured = flags_given(training)
    cells = cells_of(_grid(options, configured), typed, nproc=nproc)
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


def _default_folder() -> Path:
    return Path("sweeps") / datetime.datetime.now().strftime("%Y%m%d-%H%M%S")


def _grid(options: argparse.Namespace, configured: Values) -> Grid:
    """The grid of the file and of the command line, on top of what `--config` says."""
    axes = parse_axes(options.grid)
    grid = read_grid_file(options.grid_file) if options.grid_file else Grid()
    for key in axes:
        if any(key in row for row in grid.rows):
            raise UserError(f"--grid {key}: the cells of {options.grid_file} set it themselves")
    return Grid(base={**grid.base, **configured}, axes={**grid.axes, **axes}, rows=grid.rows)


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
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _interrupt)
        try:
            with self._display:
                self._write()
                for row in self._rows:
                    self._one(row)
            if self._has_run:
                self._report()
        except Interrupted as stopped:
            self._display.line(
                f"memscale: {stopped}; what is done is kept, continue with: "
                f"python -m launcher sweep --out {self._folder.path}"
            )
            return ExitCode.PREEMPTED
        self._close()
        return ExitCode.DONE

    def _one(self, row: Row) -> None:
        name = row.cell.name
        if not row.done:
            # A sweep that was killed may have left a cell that ended all the same.
            self._folder.settle(row, None)
        if row.done:
            self._display.kept(row)
            return
        self._folder.move_aside(name)
        row.state, row.reason, row.duration_s, row.figures = "running", None, None, None
        self._write()
        self._display.started(row)
        self._has_run = True
        started_s = time.monotonic()
        try:
            ended = run_to_end(
                [
                    *(sys.executable, "-m", "launcher.torchrun", "--nproc", str(self._nproc)),
                    *("-m", "launcher.train", *flags_of(row.cell.flags)),
                    f"--out={self._folder.run_folder(name)}",
                ],
                log=self._folder.log(name),
                timeout_s=self._timeout_s,
                tick=lambda: self._display.elapsed(time.monotonic() - started_s),
            )
        except Interrupted as stopped:
            row.state, row.reason = "interrupted", str(stopped)
            self._write()
            raise
        self._folder.settle(row, ended)
        self._write()
        self._display.finished(row)

    def _write(self) -> None:
        self._folder.write(self._rows, nproc=self._nproc, arguments=self._arguments)

    def _report(self) -> None:
        try:
            report_sweep(self._folder.path)
        except Exception as error:  # the cells are done, whatever a report makes of them
            reason = (str(error) or type(error).__name__).splitlines()[0]
            self._display.line(f"memscale: no report could be made of this sweep: {reason}")

    def _close(self) -> None:
        for row in self._rows:
            if row.state in ("failed", "timeout"):
                log = self._folder.log(row.cell.name)
                self._display.line(f"{row.cell.name}: {outcome(row)} (see {log})")
        counts = Counter(row.state for row in self._rows)
        states = ", ".join(f"{count} {state}" for state, count in counts.items())
        self._display.line(f"{len(self._rows)} cells: {states}; in {self._folder.path}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    # A second signal must not cut the stopping of the cell short.
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    raise Interrupted(f"stopped by {signal.Signals(number).name}")
