"""One rank's `rank<N>.jsonl`: whole lines in their order; what the disk does not take yet waits."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from launcher.errors import Failure
from launcher.record import Record
from launcher.run.rewind import rewind

_WAITING_BYTES = 1 << 16  # between logged steps
_MOST_WAITING_BYTES = 64 << 20  # on a disk that takes nothing: some hundred thousand steps


class RecordFile:
    """Appends records. A disk that is full, or went read-only, is no reason to stop training.

    Args:
        reopens: an earlier attempt of the run has left a file, and this one goes on in it.
    """

    def __init__(self, path: Path, *, reopens: bool) -> None:
        self._path = path
        # Unbuffered: what was not written is in `_waiting`, and nowhere else.
        self._file: Any = path.open("ab" if reopens else "xb", buffering=0)
        # The life before may have been killed inside a line.
        self._waiting = bytearray(b"\n" if path.stat().st_size else b"")
        self.trouble: str | None = None
        """Why records wait in memory; None while the disk takes them."""

    def add(self, record: Record) -> None:
        """Have a record written with the next `flush`, or sooner."""
        self._waiting += (json.dumps(record.as_dict(), allow_nan=False) + "\n").encode()
        if len(self._waiting) > _WAITING_BYTES and self.trouble is None:
            self.flush()

    def flush(self, *, durably: bool = False) -> None:
        """Write what waits; `durably`: so that it outlives the machine, too.

        Raises:
            Failure: the disk has taken nothing for so long that too much waits.
        """
        try:
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
            if durably:
                os.fsync(self._file.fileno())
                sync_folder(self._path.parent)
        except OSError as error:
            self._bear(error)
            return
        if self.trouble is not None:
            self._say(f"{self._path} is written again, nothing is missing")
            self.trouble = None

    def rewind(self, step: int) -> None:
        """Take back what an earlier attempt has written of the steps after `step`."""
        self.flush()
        self._file.close()
        try:
            rewind(self._path, step)
        finally:  # stopped on the way by a signal or the disk, the run still records its end
            self._file = self._path.open("ab", buffering=0)

    def close(self) -> None:
        """Write what waits; nothing more is taken."""
        self.flush()
        self._file.close()

    def _bear(self, error: OSError) -> None:
        trouble = f"{self._path} cannot be written ({error.strerror})"
        if self.trouble is None:
            self._say(f"{trouble}: training goes on, and its records wait in memory")
        self.trouble = trouble
        if len(self._waiting) > _MOST_WAITING_BYTES:
            raise Failure(f"{trouble}, and no more records can wait in memory: make room there")

    def _say(self, sentence: str) -> None:
        print(f"shardscale: {sentence}", file=sys.stderr, flush=True)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder outlive the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
