"""Run one command, and leave no process of it behind. Only the standard library."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

POLL_S = 0.1
GRACE_S = 10.0  # between SIGTERM and SIGKILL: a training saves meanwhile
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The end of a command: done, failed, or cut by a signal or by the end of the plan."""

    state: str
    why: str | None
    exit_code: int | None
    duration_s: float


class Stop:
    """Counts the signals that ask for the end. Parts are in sessions of their own: Ctrl-C on a
    terminal reaches only the plan, which ends them."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.heard: list[int] = []

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in self.SIGNALS}
        for number in self.SIGNALS:
            signal.signal(number, lambda heard, _: self.heard.append(heard))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def run_command(
    words: Sequence[str],
    log: Path,
    *,
    folder: Path,
    environment: Mapping[str, str],
    limit_s: float,
    plan_ends_s: float,
    stop: Stop,
) -> Outcome:
    """Run one command in `folder` to its end, its own limit or the plan's; output goes to `log`.

    Args:
        plan_ends_s: on the monotonic clock.
    """
    began_s = time.monotonic()

    def outcome(state: str, why: str | None = None, exit_code: int | None = None) -> Outcome:
        duration_s = time.monotonic() - began_s
        return Outcome(state=state, why=why, exit_code=exit_code, duration_s=duration_s)

    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                words,
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return outcome("failed", str(error))
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(POLL_S)
                return outcome("failed", f"exit code {code}", code) if code else outcome("done")
            if stop.heard:
                return outcome("cut", signal.Signals(stop.heard[0]).name)
            if time.monotonic() >= plan_ends_s:
                return outcome("cut", "the plan's time is over")
            if time.monotonic() - began_s >= limit_s:
                return outcome("failed", f"ended at its limit of {limit_s:.0f} s")
    finally:
        end_processes(process, stop)


def end_processes(process: subprocess.Popen[bytes], stop: Stop) -> None:
    """End the part's process group and whatever it has left behind; a second signal hurries."""
    asked_s, signals = time.monotonic(), len(stop.heard)
    _signal_group(process.pid, signal.SIGTERM)
    while process.poll() is None and time.monotonic() - asked_s < GRACE_S:
        if len(stop.heard) > signals:
            break
        time.sleep(POLL_S)
    _signal_group(process.pid, signal.SIGKILL)
    # Ranks have sessions of their own; one that stays would keep its memory on the GPU. What a
    # driver does not let go of is left, rather than the plan's time spent on it.
    until_s = time.monotonic() + GRACE_S
    while (children := _children()) and time.monotonic() < until_s:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
        time.sleep(POLL_S / 10)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _children() -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # one that has just ended
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                found.append(int(stat.parent.name))
    return found
