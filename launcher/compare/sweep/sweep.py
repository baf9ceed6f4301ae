"""Cells of a sweep: prepared for other machines, or trained here in sequence."""

import argparse
import shlex
from collections import Counter
from collections.abc import Sequence

import torch
from filelock import FileLock, Timeout

from launcher.compare.report.find import SWEEP_FILE, read_sweep
from launcher.compare.report.report_cli import report_sweep
from launcher.compare.sweep.cell import install_signal_handlers, run_cell, settle_unfinished
from launcher.compare.sweep.display import SweepDisplay, outcome
from launcher.compare.sweep.grid import cells_of, flags_given, open_corpora
from launcher.compare.sweep.grid_source import flags_of, grid_of, parse_options
from launcher.compare.sweep.sweep_folder import SweepFolder, merge_earlier
from launcher.config.arguments import parse_run_config
from launcher.data.sources import find_source
from launcher.measure.records import Sweep, SweepRow
from launcher.run.agreement import stop_exit_code
from launcher.run.ending import Interrupted
from launcher.util.errors import WHY, ExitCode, UserError, refused
from launcher.util.startup import require_own_package


def prepare(argv: Sequence[str]) -> tuple[SweepFolder, Sweep]:
    """Check all cells for another machine, which has GPUs unless --device cpu is given.

    Writes nothing.

    Raises:
        UserError: anything that a cell's job would refuse, or a folder that is taken.
    """
    options, training = parse_options(argv)
    folder = SweepFolder(options.out)
    folder.check()
    if folder.read() is not None:
        raise UserError(f"--out {folder.path} already holds a sweep: choose another folder")
    if options.nproc is None:
        raise UserError("the number of processes per cell is missing: give --nproc 4, for example")
    typed, configured = flags_given(training)
    rows = cells_of(
        grid_of(options, configured),
        typed,
        nproc=options.nproc,
        choose_device=lambda wanted, ranks: "cpu" if wanted == "cpu" else "cuda",
    )
    for row in rows:
        if not row.done:
            _check_source(row)
    if all(row.done for row in rows):
        first = next((row for row in rows if row.state == "refused"), rows[0])
        raise UserError(f"no cell of this sweep can run; {first.name}: {first.reason}")
    return folder, Sweep(nproc=options.nproc, arguments=list(argv), cells=rows)


def _check_source(row: SweepRow) -> None:
    try:
        data = parse_run_config(flags_of(row.flags)).data
        find_source(data)
    except UserError as error:
        row.state, row.reason = "refused", str(error)


def tasks(sweep: Sweep) -> str:
    """List the cells that can run, in the format of sbatch's --array: `0,1,3`."""
    return ",".join(str(number) for number, row in enumerate(sweep.cells) if not row.done)


def write_prepared(argv: Sequence[str]) -> int:
    """Write a checked sweep, and print how each cell is run."""
    folder, sweep = prepare([token for token in argv if token != "--prepare"])
    folder.create()
    folder.write(sweep)
    print(f"sweep of {len(sweep.cells)} cells in {folder.path}: run each of {tasks(sweep)} with")
    print(f"python -m launcher sweep --out {shlex.quote(str(folder.path))} --cell NUMBER")
    return ExitCode.DONE


def run_task(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run cell number `--cell`; 0 when it is done, 4 when it failed, 5 when stopped, 130 by Ctrl-C.

    Raises:
        UserError: no such cell, or flags besides --out.
    """
    given = {token.partition("=")[0] for token in argv if token.startswith("--")}
    if given != {"--out", "--cell"}:
        raise UserError("--cell runs a cell as it was prepared: give only --out with it")
    folder = SweepFolder(options.out)
    row, sweep = folder.read_cell(options.cell)
    settle_unfinished(row, folder)
    where = f"cell {options.cell} of {folder.path}, {row.name}"
    if row.done:
        print(f"{where}: {outcome(row)} (kept)")
        return ExitCode.DONE
    as_prepared, _ = parse_options(sweep.arguments)
    print(f"{where}: started; it logs to {folder.log(row.name)}", flush=True)
    install_signal_handlers()
    number = None
    try:
        timeout_s = 60 * as_prepared.timeout_minutes
        run_cell(row, folder, nproc=sweep.nproc, timeout_s=timeout_s)
    except Interrupted as stopped:
        number = stopped.number
    print(f"{where}: {outcome(row)}", flush=True)
    if row.state in ("preempted", "interrupted"):
        return stop_exit_code(number)
    return ExitCode.DONE if row.done else ExitCode.FAILED


def sweep_here(options: argparse.Namespace, training: list[str], argv: Sequence[str]) -> int:
    """Run or continue a sweep on this machine; return its exit code."""
    require_own_package()
    folder = SweepFolder(options.out)
    folder.check()
    earlier = folder.read()
    timeout_s = 60 * options.timeout_minutes
    if earlier is not None and not options.grid and not options.grid_file:
        if training or options.nproc:
            raise UserError(
                f"{folder.path} continues with its own grid and flags: give only --out and "
                "--timeout-minutes"
            )
        argv = earlier.arguments
        options, training = parse_options(argv)
    nproc: int = options.nproc or max(1, torch.cuda.device_count())
    typed, configured = flags_given(training)
    rows = cells_of(grid_of(options, configured), typed, nproc=nproc)
    if earlier is not None:
        merge_earlier(rows, earlier, nproc=nproc)
    open_corpora(rows, nproc=nproc)
    folder.create()
    lock = FileLock(folder.path / ".lock")
    with (
        refused(OSError, f"{lock.lock_file} cannot be locked: {WHY}"),
        refused(
            Timeout, f"another sweep is running in {folder.path}: wait for it, or choose --out"
        ),
    ):
        lock.acquire(timeout=0)
    sweep = Sweep(nproc=nproc, arguments=list(argv), cells=rows)
    with lock:
        # Another may have run cells since, while this one read data.
        if (folder.path / SWEEP_FILE).exists():
            merge_earlier(rows, read_sweep(folder.path), nproc=nproc)
        return _run_all(folder, sweep, timeout_s=timeout_s)


def _run_all(folder: SweepFolder, sweep: Sweep, *, timeout_s: float) -> int:
    """Run every unfinished cell; returns an exit code."""
    nproc, has_run = sweep.nproc, False
    display = SweepDisplay(sweep.cells, folder)
    display.line(
        f"sweep of {len(sweep.cells)} cells, {nproc} process{'es' if nproc > 1 else ''} each, "
        f"in {folder.path}"
    )
    install_signal_handlers()
    try:
        with display:
            folder.write(sweep)
            for row in sweep.cells:
                settle_unfinished(row, folder)
                if row.done:
                    display.kept(row)
                    continue
                has_run = True
                display.started(row)
                try:
                    run_cell(row, folder, nproc=nproc, timeout_s=timeout_s)
                finally:
                    folder.write(sweep)
                display.finished(row)
        if has_run:
            _report(folder, display)
    except Interrupted as stopped:
        display.line(
            f"shardscale: {stopped}; finished cells are kept, continue with: "
            f"python -m launcher sweep --out {shlex.quote(str(folder.path))}"
        )
        return stop_exit_code(stopped.number)
    for row in sweep.cells:
        if row.state in ("failed", "timeout"):
            display.line(f"{row.name}: {outcome(row)} (see {folder.log(row.name)})")
    counts = Counter(row.state for row in sweep.cells)
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    display.line(f"{len(sweep.cells)} cells: {states}; in {folder.path}")
    in_vain = not counts["completed"] and counts["failed"] + counts["timeout"]
    return ExitCode.FAILED if in_vain else ExitCode.DONE


def _report(folder: SweepFolder, display: SweepDisplay) -> None:
    try:
        report_sweep(folder.path)
    except Exception as error:  # a failing report must not fail finished cells
        reason = (str(error) or type(error).__name__).splitlines()[0]
        display.line(f"shardscale: the report of this sweep failed: {reason}")
