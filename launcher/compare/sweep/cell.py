"""One cell of a sweep, from how it stands to its end."""

import signal
import sys
from collections.abc import Callable
from types import FrameType

from launcher.checkpoint.store import CheckpointFolder
from launcher.compare.sweep.cell_process import TimeIsNearlyUp, run_to_end
from launcher.compare.sweep.folder import Row, SweepFolder
from launcher.run.lifecycle import Interrupted

# What a cell is that neither ended nor failed by itself; "running" where all died at once.
STOPPED = ("running", "preempted", "interrupted", "timeout")
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def run_cell(
    row: Row, folder: SweepFolder, *, nproc: int, timeout_s: float, tick: Callable[[], None]
) -> None:
    """Run the cell in processes of its own; `row` and its file say at all times how it stands.

    A cell that was stopped goes on from its newest checkpoint. One that has none, or has failed,
    starts anew, and what it has left is kept beside it.

    Raises:
        Interrupted: this process was told to stop; the cell's processes are gone.
    """
    name = row.cell.name
    run_folder = folder.run_folder(name)
    goes_on = row.state in STOPPED and CheckpointFolder(run_folder / "checkpoints").list()
    if not goes_on:
        folder.move_aside(name)
    row.state, row.reason, row.duration_s, row.figures = "running", None, None, None
    folder.write_row(row)
    try:
        ended = run_to_end(
            [
                *(sys.executable, "-m", "launcher.torchrun", "--nproc", str(nproc)),
                *("-m", "launcher.train", *row.cell.command(), f"--out={run_folder}"),
                *(["--resume=auto"] if goes_on else []),
            ],
            log=folder.log(name),
            timeout_s=timeout_s,
            tick=tick,
        )
    except Interrupted as stopped:
        row.state, row.reason = "interrupted", str(stopped)
        raise
    else:
        folder.settle(row, ended)
    finally:
        folder.write_row(row)


def stop_in_order() -> None:
    """From now on a signal ends the cell that runs, and raises Interrupted."""
    for number in STOPPING:
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # A second signal must not cut the stopping of the cell short.
    for other in STOPPING:
        signal.signal(other, signal.SIG_IGN)
    kind = TimeIsNearlyUp if number == signal.SIGUSR1 else Interrupted
    raise kind(f"stopped by {signal.Signals(number).name}")
