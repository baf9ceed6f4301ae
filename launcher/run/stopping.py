"""What the torchrun agent does when it is asked to stop: by a scheduler, or by a user."""

import contextlib
import os
import select
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

from launcher.measure.records import Status
from launcher.run.folder import RunFolder
from launcher.util.errors import ExitCode
from launcher.util.startup import hears

ASKS: tuple[signal.Signals, ...] = (
    *(signal.SIGINT, signal.SIGHUP),  # of a terminal: Ctrl-C, and its end
    *(signal.SIGTERM, signal.SIGUSR1),  # of schedulers
)
LEFT_TO_TORCH = "SIGQUIT"
AGAIN_AFTER_S = 1.0
GRACE_S = 30.0  # for this agent to end when its ranks have: those of other nodes may hang
NOTHING_YET = "before its first step"


def heard() -> list[signal.Signals]:
    """Those of `ASKS` to listen to: not what `&` in a script, or nohup, has this process ignore."""
    return [number for number in ASKS if number not in ASKS[:2] or hears(number)]


def stopped_by(number: int | None) -> str:
    """How a run that was asked to stop has ended; None: another rank was asked."""
    who = "a signal to another rank" if number is None else signal.Signals(number).name
    return f"stopped by {who}"


def stopped_code(number: int | None) -> ExitCode:
    """Its exit code."""
    return ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.PREEMPTED


class StopRequests:
    """A signal to the agent asks that the ranks finish their step, save and end.

    As long as a rank cannot hear it - it is still importing - nothing has been trained, and all
    end at once. Schedulers ask more than once, so only the first counts, but for SIGINT: the second
    Ctrl-C of a user ends all at once. A thread of its own acts on it: the main one may be waiting
    for other nodes.
    """

    def __init__(self, folder: Path | None, scratch: Path) -> None:
        self.asked_by: int | None = None
        self._scratch = scratch
        self._folder = None if folder is None else RunFolder(folder)
        self._before = self._status()

    def install(self) -> None:
        """Listen from now on."""
        readable, writable = os.pipe()
        os.set_blocking(writable, False)
        signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        for number in heard():
            signal.signal(number, _heard)
        threading.Thread(target=self._listen, args=(readable,), daemon=True).start()

    def close(self) -> None:
        """The run has ended: whoever asks now is too late."""
        for number in ASKS:
            signal.signal(number, signal.SIG_IGN)

    def settle(self) -> int | None:
        """The exit code, where the run was stopped before it could say so itself; else None."""
        status = self._status()
        if self.asked_by is None or (status != self._before and status.get("state") != "running"):
            return None
        code, reason = stopped_code(self.asked_by), f"{stopped_by(self.asked_by)} {NOTHING_YET}"
        if self._folder is not None and self._has_run(self._folder):
            stopped = Status(
                state="preempted",
                phase=status.get("phase", "start"),
                reason=reason,
                exit_code=code,
            )
            self._folder.write_status(stopped)
        print(f"shardscale: {reason}: there was nothing to save", file=sys.stderr, flush=True)
        return code

    def _listen(self, readable: int) -> None:
        numbers: list[int] = []
        while not numbers:
            numbers = [number for number in os.read(readable, 64) if number in ASKS]
        self.asked_by = numbers.pop(0)
        # Which of the two decides the run's exit code. A rank that has a handler for the other has
        # one for this: they are set in the order of `ASKS`.
        tell = signal.SIGINT if self.asked_by == signal.SIGINT else signal.SIGUSR1
        had_ranks = False
        while True:
            ranks = _ranks()
            if signal.SIGINT in numbers:
                self._end_at_once(ranks)
            had_ranks |= bool(ranks)
            if not had_ranks or any(_is_deaf(rank) for rank in ranks):
                self._end(ranks)
            if not ranks:
                time.sleep(GRACE_S)
                self._end(ranks)
            # Again and again: nothing says that a rank has heard it.
            for rank in ranks:
                with contextlib.suppress(psutil.Error):
                    rank.send_signal(tell)
            numbers = []
            if select.select([readable], [], [], AGAIN_AFTER_S)[0]:
                numbers = list(os.read(readable, 64))

    def _end_at_once(self, ranks: list[psutil.Process]) -> NoReturn:
        """What was not saved by now is lost."""
        _kill(ranks)
        shutil.rmtree(self._scratch, ignore_errors=True)
        seen = f"{stopped_by(signal.SIGINT)} twice, before it was saved"
        status: dict[str, Any] = {"reason": seen}
        if self._folder is not None and self._has_run(self._folder):
            status = self._folder.settle(seen, None, code=ExitCode.INTERRUPTED)
        if status["reason"] == seen:  # else it had just ended by itself
            print(f"shardscale: {seen}", file=sys.stderr, flush=True)
        os._exit(ExitCode.INTERRUPTED)

    def _end(self, ranks: list[psutil.Process]) -> None:
        _kill(ranks)
        shutil.rmtree(self._scratch, ignore_errors=True)
        code = self.settle()
        os._exit(int(self._status().get("exit_code") or 0) if code is None else code)

    @staticmethod
    def _has_run(folder: RunFolder) -> bool:
        """Of this launch: another's, which has taken the folder first, is none of ours."""
        return (folder.path / "config.yaml").exists() and not folder.is_anothers

    def _status(self) -> dict[str, Any]:
        return {} if self._folder is None else self._folder.read_status()


def _kill(ranks: list[psutil.Process]) -> None:
    for rank in ranks:
        with contextlib.suppress(psutil.Error):
            rank.kill()
    psutil.wait_procs(ranks, timeout=GRACE_S)


def _heard(number: int, frame: FrameType | None) -> None:
    """The thread reads it from the pipe."""


def _ranks() -> list[psutil.Process]:
    """This agent's ranks that run."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "RANK" in process.environ():
                found.append(process)
    return found


def _is_deaf(rank: psutil.Process) -> bool:
    """Whether SIGUSR1 would just kill it: it has no handler yet."""
    try:
        status = Path(f"/proc/{rank.pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False
    if "State:\tZ" in status:
        return False
    masks = [int(status.partition(f"{name}:")[2].split()[0], 16) for name in ("SigCgt", "SigIgn")]
    return not (masks[0] | masks[1]) >> (signal.SIGUSR1 - 1) & 1
