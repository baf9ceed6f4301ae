"""Stop signals to the torchrun agent, from a scheduler or a user: ranks save and end."""

import contextlib
import os
import select
import shutil
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

from launcher.measure.records import Status
from launcher.run.agreement import STOP_SIGNALS, heard_signals, stop_exit_code, stop_reason
from launcher.run.resume import has_our_run
from launcher.run.run_folder import RunFolder
from launcher.util.errors import ExitCode, tell

# The one signal that torch's agent handles: for each on its list it replaces our handler when it
# starts ranks, and it logs a warning for an empty list.
LEFT_TO_TORCH = "SIGQUIT"
AGAIN_AFTER_S = 1.0
SAVE = stop_reason(signal.SIGUSR1)  # what ranks were sent, whatever this agent has received
GRACE_S = 30.0  # for this agent to end when its ranks have: those of other nodes may hang


class AgentSignals:
    """Pass a stop signal to the agent on to its ranks, which finish their step, save and end.

    While a rank has no handler yet, because it is still importing, nothing has been trained, and
    all ranks end at once. Schedulers signal more than once, so only the first signal counts, except
    for SIGINT: a user's second Ctrl-C ends all ranks at once. A thread handles signals, since the
    main one may be waiting for other nodes.
    """

    def __init__(self, folder: Path | None, scratch: Path) -> None:
        self.stop_signal: int | None = None
        self.tells = threading.Lock()
        """Held by the thread that writes how the run ended: the main one sees killed ranks, too."""
        self._scratch = scratch
        self._folder = None if folder is None else RunFolder(folder)
        self._before = self._status()  # of an earlier start in this folder

    def install(self) -> None:
        """Handle signals from now on."""
        readable, writable = os.pipe()
        os.set_blocking(writable, False)  # as set_wakeup_fd requires
        signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        for number in heard_signals():
            signal.signal(number, _heard)
        threading.Thread(target=self._listen, args=(readable,), daemon=True).start()

    def close(self) -> None:
        """Ignore signals: the run has ended."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def settle(self) -> int | None:
        """Write the status of a run that was stopped before its ranks could; returns its exit code,
        or None where it was not."""
        if self.stop_signal is None:
            return None
        status = self._status()
        if status != self._before and status.get("state") != "running":  # the ranks have ended it
            self._name_signal(status)
            return None
        code = stop_exit_code(self.stop_signal)
        reason = f"{stop_reason(self.stop_signal)} before its first step"
        if (run := self._begun) is not None:
            phase = status.get("phase", "start")
            run.write_status(Status(state="preempted", phase=phase, reason=reason, exit_code=code))
        tell(f"{reason}: there was nothing to save")
        return code

    def _name_signal(self, status: dict[str, Any]) -> None:
        """Replace what the ranks were sent by what this agent received."""
        if (run := self._begun) is not None and status.get("reason") == SAVE:
            run.write_status(Status(**status | {"reason": stop_reason(self.stop_signal)}))

    def _listen(self, readable: int) -> None:
        numbers: list[int] = []
        # Python writes a byte for each signal: its number
        while not numbers:
            numbers = [number for number in os.read(readable, 64) if number in STOP_SIGNALS]
        self.stop_signal = numbers.pop(0)
        # Which of the two decides the run's exit code. A rank that has a handler for the other has
        # one for this: they are set in the order of `STOP_SIGNALS`.
        forwarded = signal.SIGINT if self.stop_signal == signal.SIGINT else signal.SIGUSR1
        had_ranks = False
        while True:
            ranks = running_ranks()
            if signal.SIGINT in numbers:
                self._end_at_once(ranks)
            had_ranks |= bool(ranks)
            if not had_ranks or any(_is_deaf(rank) for rank in ranks):
                self._end(ranks)
            if not ranks:
                time.sleep(GRACE_S)
                self._end(ranks)
            # Repeated: nothing confirms that a rank has received it.
            for rank in ranks:
                with contextlib.suppress(psutil.Error):
                    rank.send_signal(forwarded)
            numbers = []
            if select.select([readable], [], [], AGAIN_AFTER_S)[0]:
                numbers = list(os.read(readable, 64))

    def _end_at_once(self, ranks: list[psutil.Process]) -> NoReturn:
        """Kill the ranks; what they have not saved is lost."""
        self.tells.acquire()  # never released: os._exit follows
        _kill(ranks)
        shutil.rmtree(self._scratch, ignore_errors=True)
        seen = f"{stop_reason(signal.SIGINT)} twice, before it was saved"
        status: dict[str, Any] = {"reason": seen}
        if (run := self._begun) is not None:
            status = run.settle(seen, None, code=ExitCode.INTERRUPTED)
        if status["reason"] == seen:  # else it had just ended by itself
            tell(seen)
        os._exit(ExitCode.INTERRUPTED)

    def _end(self, ranks: list[psutil.Process]) -> NoReturn:
        self.tells.acquire()  # never released: os._exit follows
        _kill(ranks)
        shutil.rmtree(self._scratch, ignore_errors=True)
        code = self.settle()
        os._exit(int(self._status().get("exit_code") or 0) if code is None else code)

    @property
    def _begun(self) -> RunFolder | None:
        """The run folder, once this launch has begun its run there."""
        folder = self._folder
        return folder if folder is not None and has_our_run(folder.path) else None

    def _status(self) -> dict[str, Any]:
        return {} if self._folder is None else self._folder.read_status()


def _kill(ranks: list[psutil.Process]) -> None:
    # Stopped first: one that sees another one gone would record that as the run's failure.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for rank in ranks:
            with contextlib.suppress(psutil.Error):
                rank.send_signal(number)
    psutil.wait_procs(ranks, timeout=GRACE_S)


def _heard(number: int, frame: FrameType | None) -> None:
    """The thread reads it from the pipe."""


def running_ranks() -> list[psutil.Process]:
    """Return this agent's running ranks."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "RANK" in process.environ():
                found.append(process)
    return found


def _is_deaf(rank: psutil.Process) -> bool:
    """Return whether SIGUSR1 would kill the rank, which has no handler yet."""
    try:
        status = Path(f"/proc/{rank.pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False
    if "State:\tZ" in status:  # it has ended
        return False
    # hexadecimal masks, in which bit n - 1 stands for signal n
    masks = [int(status.partition(f"{name}:")[2].split()[0], 16) for name in ("SigCgt", "SigIgn")]
    return not (masks[0] | masks[1]) >> (signal.SIGUSR1 - 1) & 1
