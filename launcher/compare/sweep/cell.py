"""Run one cell of a sweep in processes of its own, none of which outlives it."""

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
from launcher.compare.sweep.grid import training_flags
from launcher.compare.sweep.sweep_folder import SweepFolder
from launcher.measure.records import Summary, SweepRow
from launcher.run.agreement import STOP_SIGNALS, heard_signals
from launcher.run.ending import Interrupted
from launcher.run.run_folder import RunFolder
from launcher.util.errors import ExitCode
from launcher.util.processes import for_children

# States of a cell that neither completed nor failed; "running" if sweep and cell died together.
STOPPED = ("running", "preempted", "interrupted", "timeout")
STOPPED_CODES = (None, ExitCode.PREEMPTED, ExitCode.INTERRUPTED)
FIGURES = (
    *("strategy", "model", "world_size", "steps", "test_loss", "perplexity"),
    *("tokens_per_s", "peak_bytes", "peak_kind"),
)
GRACE_S = 10.0  # for ranks to save and to write status.json
LONG_GRACE_S = 110.0  # of the two minutes between USR1 and the end of a batch job


def run_cell(row: SweepRow, folder: SweepFolder, *, nproc: int, timeout_s: float) -> None:
    """Run the cell in processes of its own; `row` and its file always show its current state.

    A stopped cell resumes from its newest checkpoint. Without one, or after a failure, it starts
    over, and the earlier attempt is kept beside it.

    Raises:
        Interrupted: this process received a signal; the cell's processes have ended.
    """
    run_folder = folder.run_folder(row.name)
    resumes = row.state in STOPPED and CheckpointFolder(run_folder / "checkpoints").list()
    if not resumes:
        folder.move_aside(row.name)
    row.state, row.reason, row.duration_s, row.figures = "running", None, None, None
    folder.write_row(row)
    started_s = time.monotonic()
    try:
        code = run_to_end(
            [
                *(sys.executable, "-m", "launcher.torchrun", "--nproc", str(nproc)),
                *("-m", "launcher.train", *training_flags(row), f"--out={run_folder}"),
                *(["--resume=auto"] if resumes else []),
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


def settle_unfinished(row: SweepRow, folder: SweepFolder) -> None:
    """Update a row from its run folder: the cell may have ended after its sweep was killed."""
    if not row.done:
        _settle(row, folder)
    folder.write_row(row)


def install_signal_handlers() -> None:
    """Make signals raise Interrupted, which ends the running cell."""
    for number in heard_signals():
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # A second signal must not interrupt the shutdown of the cell.
    for other in STOP_SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise Interrupted(number)


def _settle(
    row: SweepRow, folder: SweepFolder, code: int | None = None, duration_s: float | None = None
) -> None:
    """Read from the run folder how the cell ended.

    `duration_s` is None if this process did not see it end; `code` is None after a time-out too.
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
            f"stopped after {duration_s / 60:.1f} minutes while in {phase}: raise --timeout-minutes"
        )
    # with another exit code "preempted" is of the attempt that this one resumed
    elif state == "failed" or (state == "preempted" and code in STOPPED_CODES):
        row.state = state
    elif duration_s is not None:
        # It died before writing a status: `status` belongs to an earlier attempt.
        row.state = "failed"
        row.reason = _failure_in_log(folder.log(row.name)) or f"exit code {code}"
    row.figures = None
    with contextlib.suppress(FileNotFoundError):
        summary = Summary.of(json.loads((run_folder / "summary.json").read_text()))
        row.figures = {name: getattr(summary, name) for name in FIGURES}


def _failure_in_log(log: Path) -> str:
    """Extract from the log why a run without a folder ended: refusal and exception."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    prefix = "shardscale: "
    refusals = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
    exceptions = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return ": ".join([*refusals[-1:], *exceptions[-1:]])


def run_to_end(command: Sequence[str], *, log: Path, timeout_s: float) -> int | None:
    """Run `command`, appending its output to `log`; returns its exit code, None after the time-out.

    After the time-out or an exception (Ctrl-C), all of its processes are ended.
    """
    with open(log, "ab") as output:
        # A session of its own, so that Ctrl-C in the terminal reaches only the sweep, which then
        # stops the cell.
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
    except Interrupted as stopped:
        if stopped.number == signal.SIGUSR1:  # Slurm's, sent shortly before the time limit
            grace_s = LONG_GRACE_S
        raise
    finally:
        _stop(process, grace_s)
    return code


def _stop(process: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """End a running process and its descendants, whatever their sessions."""
    if process.poll() is not None:
        return
    parent = psutil.Process(process.pid)
    # Listed before the parent ends: orphans cannot be found afterwards.
    family = [*parent.children(recursive=True), parent]
    try:
        # Ranks finish their step and save.
        os.kill(process.pid, signal.SIGUSR1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    finally:  # also after Ctrl-C during the wait
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=GRACE_S)
        process.wait()
