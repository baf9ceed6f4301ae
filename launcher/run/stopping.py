"""What the torchrun agent does when it is asked to stop: by a scheduler, or by a user."""

import contextlib
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from launcher.errors import ExitCode
from launcher.folder_lock import FolderLock
from launcher.measure.records import Status
from launcher.run.folder import RunFolder

ASKS: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGUSR1)
LEFT_TO_TORCH = "SIGINT,SIGHUP,SIGQUIT"
AGAIN_AFTER_S = 1.0
GRACE_S = 30.0  # for this agent to end when its ranks have: those of other nodes may hang
NOTHING_YET = "asked to stop by a signal before its first step"


class StopRequests:
    """SIGTERM or SIGUSR1 to the agent asks that the ranks finish their step, save and end.

    As long as a rank cannot hear it - it is still importing - nothing has been trained, and all
    end at once. Schedulers ask more than once, so only the first counts; SIGINT ends at
    once. A thread of its own acts on it: the main one may be waiting for other nodes.
    """

    def __init__(self, folder: Path | None, scratch: Path) -> None:
        self.asked = False
        self._scratch = scratch
        self._folder = None if folder is None else RunFolder(folder)
        self._before = self._status()

    def install(self) -> None:
        """Listen from now on."""
        readable, writable = os.pipe()
        os.set_blocking(writable, False)
        signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        for number in ASKS:
            signal.signal(number, _heard)
        threading.Thread(target=self._listen, args=(readable,), daemon=True).start()

    def close(self) -> None:
        """The run has ended: whoever asks now is too late."""
        for number in ASKS:
            signal.signal(number, signal.SIG_IGN)

    def settle(self) -> int | None:
        """The exit code, where the run was stopped before it could say so itself; else None."""
        status = self._status()
        if not self.asked or (status != self._before and status.get("state") != "running"):
            return None
        if self._folder is not None and self._has_run(self._folder.path):
            stopped = Status(
                state="preempted",
                phase=status.get("phase", "start"),
                reason=NOTHING_YET,
                exit_code=ExitCode.PREEMPTED,
            )
            self._folder.write_status(stopped)
        print(f"shardscale: {NOTHING_YET}: there was nothing to save", flush=True)
        return ExitCode.PREEMPTED

    def _listen(self, readable: int) -> None:
        while not set(os.read(readable, 64)) & set(ASKS):
            pass
        self.asked = True
        had_ranks = False
        while True:
            ranks = _ranks()
            had_ranks |= bool(ranks)
            if not had_ranks or any(_is_deaf(rank) for rank in ranks):
                self._end(ranks)
            if not ranks:
                time.sleep(GRACE_S)
                self._end(ranks)
            # Again and again: nothing says that a rank has heard it.
            for rank in ranks:
                with contextlib.suppress(psutil.Error):
                    rank.send_signal(signal.SIGUSR1)
            time.sleep(AGAIN_AFTER_S)

    def _end(self, ranks: list[psutil.Process]) -> None:
        for rank in ranks:
            with contextlib.suppress(psutil.Error):
                rank.kill()
        psutil.wait_procs(ranks, timeout=GRACE_S)
        shutil.rmtree(self._scratch, ignore_errors=True)
        code = self.settle()
        os._exit(int(self._status().get("exit_code") or 0) if code is None else code)

    @staticmethod
    def _has_run(folder: Path) -> bool:
        """One that has ended: another's, which has just taken the folder, is none of ours."""
        return (folder / "config.yaml").exists() and FolderLock(folder).holder() is None

    def _status(self) -> dict[str, Any]:
        return {} if self._folder is None else self._folder.read_status()


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
