"""One cell in processes of its own, of which nothing is left when it is over."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from launcher.orphans import for_children
from launcher.run.lifecycle import Interrupted

TICK_S = 0.5
GRACE_S = 10.0  # the time that ranks have to save and to write how they ended
LONG_GRACE_S = 110.0  # of the two minutes that the batch scripts have from USR1 on


class TimeIsNearlyUp(Interrupted):
    """Slurm's SIGUSR1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How the processes ended. `exit_code` is None when they were stopped at the time-out."""

    exit_code: int | None
    duration_s: float


def run_to_end(
    command: Sequence[str], *, log: Path, timeout_s: float, tick: Callable[[], None]
) -> Ended:
    """Run `command` with its output at the end of `log`, calling `tick` twice a second.

    At the time-out, or when anything is raised in here (Ctrl-C), all of its processes are ended.
    """
    started_s = time.monotonic()
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
    grace_s = GRACE_S
    try:
        while time.monotonic() < started_s + timeout_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(TICK_S)
                return Ended(exit_code=code, duration_s=time.monotonic() - started_s)
            tick()
    except TimeIsNearlyUp:
        grace_s = LONG_GRACE_S
        raise
    finally:
        _stop(process, grace_s)
    return Ended(exit_code=None, duration_s=time.monotonic() - started_s)


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
