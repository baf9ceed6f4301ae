"""Trials of `--micro-batch auto`: two real steps in short-lived process groups."""

import contextlib
import dataclasses
import datetime
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Final, Self

from launcher.config.arguments import with_micro_batch
from launcher.parallel.rendezvous import LOOPBACK, listening_store
from launcher.util.errors import ExitCode, UserError
from launcher.util.files import scratch_folder
from launcher.util.processes import for_children

WORKER: Final = "launcher.probe"
TICK_S: Final = 0.05
GRACE_S: Final = 3.0
"""Time for the other ranks to end once one has failed."""
STORE_TIMEOUT: Final = datetime.timedelta(minutes=5)
OUT_OF_MEMORY: Final = (ExitCode.OUT_OF_MEMORY, -signal.SIGKILL, -signal.SIGABRT)
"""Exit codes of a rank without memory: ours, the kernel's OOM killer, and C++ aborts."""
STOPPING: Final = (signal.SIGTERM, signal.SIGUSR1)


class Stopped(BaseException):
    """A signal asked to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} while searching a micro-batch")
        self.exit_code = ExitCode.PREEMPTED  # the same command, later, searches again


@dataclasses.dataclass(slots=True)
class Trials:
    """Runs all ranks for two steps, once per trial."""

    argv: Sequence[str]
    ranks: int
    folder: Path
    count: int = 0

    @classmethod
    @contextlib.contextmanager
    def of(cls, argv: Sequence[str], *, ranks: int) -> Iterator[Self]:
        """Open trials of a run with `argv`; nothing of them is left afterwards."""
        handlers = {number: signal.signal(number, _stop) for number in STOPPING}
        try:
            with scratch_folder("trials") as folder:
                yield cls(argv, ranks, folder)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def run(self, size: int) -> bool:
        """Run two steps with this micro-batch; returns False after out of memory.

        Raises:
            UserError: another failure, with the rank's last line of output.
        """
        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir()
        codes = self._start(folder, with_micro_batch(self.argv, size))
        ran = not any(codes.values())
        if ran or set(codes.values()) & set(OUT_OF_MEMORY):
            shutil.rmtree(folder)
            return ran
        rank = next(rank for rank, code in codes.items() if code)
        said = (folder / f"{rank}.log").read_text(errors="replace").strip().splitlines()
        raise UserError(
            f"--micro-batch auto: a trial with {size} failed on rank {rank} with exit code "
            f"{codes[rank]}, so give a number: {said[-1] if said else 'it said nothing'}"
        )

    def _start(self, folder: Path, argv: Sequence[str]) -> dict[int, int]:
        """Run all ranks to the end; returns exit codes of those that ended by themselves."""
        command = [sys.executable, "-m", WORKER, str(folder / "run"), *argv]
        environment = os.environ | for_children()
        store = None
        if self.ranks > 1:
            # Served from here and not from rank 0: a port that is bound already cannot be lost.
            store = listening_store(LOOPBACK, 0, nodes=1, timeout=STORE_TIMEOUT)
            environment |= {
                "MASTER_ADDR": LOOPBACK,
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 connects, too
                "TORCHELASTIC_RESTART_COUNT": "0",
                "WORLD_SIZE": str(self.ranks),
                "LOCAL_WORLD_SIZE": str(self.ranks),
            }
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(self.ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if store is not None else {}
                with (folder / f"{rank}.log").open("wb") as log, _stop_deferred():
                    processes.append(
                        subprocess.Popen(
                            command,
                            env=environment | own,
                            stdin=subprocess.DEVNULL,
                            stdout=subprocess.DEVNULL,
                            stderr=log,
                        )
                    )
            return _wait(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _wait(processes: "list[subprocess.Popen[bytes]]") -> dict[int, int]:
    """Wait until all have ended, or until the grace period after a first failure is over."""
    deadline_s = float("inf")
    while True:
        polled = enumerate(process.poll() for process in processes)
        codes = {rank: code for rank, code in polled if code is not None}
        if len(codes) == len(processes) or time.monotonic() > deadline_s:
            return codes
        if any(codes.values()):
            deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
        time.sleep(TICK_S)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


@contextlib.contextmanager
def _stop_deferred() -> Iterator[None]:
    """Hold stop signals back until the block ends.

    Raised between the start of a process and its entry in the list, `Stopped` would leave the
    process behind.
    """
    held: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: held.append(number)) for number in STOPPING
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if held:
        raise Stopped(held[0])
