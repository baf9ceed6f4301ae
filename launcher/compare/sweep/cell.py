"""One cell of a sweep, from how it stands to its end: in processes of its own, of which nothing is
left when it is over."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import psutil

from launcher.checkpoint.store import CheckpointFolder
from launcher.compare.sweep.folder import SweepFolder
from launcher.compare.sweep.grid import training_flags
from launcher.measure.records import Summary, SweepRow
from launcher.run.folder import RunFolder
from launcher.run.lifecycle import Interrupted
from launcher.run.stopping import ASKS, heard
from launcher.util.errors import ExitCode
from launcher.util.orphans import for_children

# What a cell is that neither ended nor failed by itself; "running" where all died at once.
STOPPED = ("running", "preempted", "interrupted", "timeout")
STOPPED_CODES = (None, ExitCode.PREEMPTED, ExitCode.INTERRUPTED)
FIGURES = (
    *("strategy", "model", "world_size", "steps", "test_loss", "perplexity"),
    *("tokens_per_s", "peak_bytes", "peak_kind"),
)
GRACE_S = 10.0  # the time that ranks have to save and to write how they ended
LONG_GRACE_S = 110.0  # of the two minutes that the batch scripts have from USR1 on


class TimeIsNearlyUp(Interrupted):
    """Slurm's SIGUSR1."""


def run_cell(row: SweepRow, folder: SweepFolder, *, nproc: int, timeout_s: float) -> None:
    """Run the cell in processes of its own; `row` and its file say at all times how it stands.

    A cell that was stopped goes on from its newest checkpoint. One that has none, or has failed,
    starts anew, and what it has left is kept beside it.

    Raises:
        Interrupted: this process was told to stop; the cell's processes are gone.
    """
    run_folder = folder.run_folder(row.name)
    goes_on = row.state in STOPPED and CheckpointFolder(run_folder / "checkpoints").list()
    if not goes_on:
        folder.move_aside(row.name)
    row.state, row.reason, row.duration_s, row.figures = "running", None, None, None
    folder.write_row(row)
    started_s = time.monotonic()
    try:
        code = run_to_end(
            [
                *(sys.executable, "-m", "launcher.torchrun", "--nproc", str(nproc)),
                *("-m", "launcher.train", *training_flags(row), f"--out={run_folder}"),
                *(["--resume=auto"] if goes_on else []),
            ],
            log=folder.log(row.name),
            timeout_s=timeout_s,
        )
    except Interrupted as stopped:
        row.state, row.reason = "interrupted", str(stopped)
        raise
    else:
        _settle(row, folder, code, time.monotonic() - started_s)
    finally:
        folder.write_row(row)


def catch_up(row: SweepRow, folder: SweepFolder) -> None:
    """What stopped or killed a sweep may have left a cell that ended all the same."""
    if not row.done:
        _settle(row, folder)
    folder.write_row(row)


def stop_in_order() -> None:
    """From now on a signal ends the cell that runs, and raises Interrupted."""
    for number in heard():
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # A second signal must not cut the stopping of the cell short.
    for other in ASKS:
        signal.signal(other, signal.SIG_IGN)
    raise TimeIsNearlyUp(number) if number == signal.SIGUSR1 else Interrupted(number)


def _settle(
    row: SweepRow, folder: SweepFolder, code: int | None = None, duration_s: float | None = None
) -> None:
    """Read from the run's own folder how the cell ended; no `duration_s` where nobody saw it end.

    `code` is None also where it was stopped at the time-out.
    """
    run_folder = folder.run_folder(row.name)
    status = RunFolder(run_folder).read_status()
    state, phase = status.get("state"), status.get("phase", "start")
    if duration_s is not None:
        row.duration_s = duration_s
    row.reason = status.get("reason")
    if state in ("completed", "oom"):
        row.state = state
    elif duration_s is not None and code is None:
        row.state = "timeout"
        row.reason = (
            f"stopped after {duration_s / 60:.1f} minutes while in {phase}: "
            "give more with --timeout-minutes"
        )
    elif state == "failed" or (state == "preempted" and code in STOPPED_CODES):
        row.state = state
    elif duration_s is not None:
        # Before it could say so: what `status` says is of an earlier attempt.
        row.state = "failed"
        row.reason = _last_words(folder.log(row.name)) or f"exit code {code}"
    row.figures = None
    with contextlib.suppress(FileNotFoundError):
        summary = Summary.of(json.loads((run_folder / "summary.json").read_text()))
        row.figures = {name: getattr(summary, name) for name in FIGURES}


def _last_words(log: Path) -> str:
    """Why a run ended that had no folder yet: our own sentence, and the exception before it."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line.removeprefix("shardscale: ") for line in lines if line.startswith("shardscale: ")]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return ": ".join([*said[-1:], *raised[-1:]])


def run_to_end(command: Sequence[str], *, log: Path, timeout_s: float) -> int | None:
    """Run `command` with its output at the end of `log`; its exit code, None at the time-out.

    At the time-out, or when anything is raised in here (Ctrl-C), all of its processes are ended.
    """
    with open(log, "ab") as output:
        # A session of its own: Ctrl-C in the terminal reaches the sweep alone, which then stops
        # the cell in order.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | for_children(),
            start_new_session=True,
        )
    code, grace_s = None, GRACE_S
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout_s)
    except TimeIsNearlyUp:
        grace_s = LONG_GRACE_S
        raise
    finally:
        _stop(process, grace_s)
    return code


def _stop(process: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """End the process, if it runs, and its descendants, wherever their sessions are."""
    if process.poll() is not None:
        return
    parent = psutil.Process(process.pid)
    # Listed before the parent goes: orphans cannot be found any more.
    family = [*parent.children(recursive=True), parent]
    try:
        # The ranks finish their step and save.
        os.kill(process.pid, signal.SIGUSR1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    finally:  # also when a Ctrl-C comes while this waits
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=GRACE_S)
        process.wait()
