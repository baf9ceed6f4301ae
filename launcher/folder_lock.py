"""One living run per run folder, also across the nodes of a shared file system."""

import fcntl
import os
import socket
from pathlib import Path
from typing import TextIO

_NAME = ".lock"


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
