"""Folders of one living process: a run's, also across the nodes of a shared file system, and
temporary ones, which the next run removes where a killed one could not."""

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

_NAME = ".lock"
PREFIX = "shardscale-"


class FolderLock:
    """Held by the main rank until its process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME
        self._file: TextIO | None = None

    def take(self) -> bool:
        """Whether the folder is ours now; False when a living run has it."""
        file = self._path.open("a", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self._file = file  # closing it would give the lock back
        return True

    @property
    def is_held(self) -> bool:
        """Whether this process has taken it."""
        return self._file is not None

    def holder(self) -> str | None:
        """The living run that has the folder; None when nobody has."""
        try:
            file = self._path.open(encoding="utf-8")
        except FileNotFoundError:
            return None
        with file:
            try:
                # Shared, so that the agents of several nodes can ask at the same time.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip() or "a process"
        return None


@contextlib.contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """A folder that goes when the block ends; those of dead processes of ours go now."""
    _remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-"))
    lock = FolderLock(folder)
    lock.take()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{_NAME}"):
        folder = lock.parent
        with contextlib.suppress(OSError):  # somebody else was faster
            ours = lock.stat().st_uid == os.getuid()
            # The kernel gives a lock back however its holder ended, also in another container.
            if ours and FolderLock(folder).holder() is None:
                shutil.rmtree(folder, ignore_errors=True)
