"""One rank's `rank<N>.jsonl`: appended in whole lines, buffered while the disk is full, and rolled
back to the checkpoint that a run resumes from."""

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

from launcher.util.errors import Failure, tell
from launcher.util.files import sync
from launcher.util.json_file import Record

_FILE = re.compile(r"rank(\d+)\.jsonl")
_WAITING_BYTES = 1 << 16  # between logged steps
_MOST_WAITING_BYTES = 64 << 20  # on a disk that takes nothing: some hundred thousand steps


class RecordFile:
    """Appends records; a disk that is full or read-only does not stop training.

    Args:
        reopens: continue in the file of the run's earlier start.
    """

    def __init__(self, path: Path, *, reopens: bool) -> None:
        self._path = path
        # Unbuffered: everything unwritten is in `_waiting`.
        self._file: Any = path.open("ab" if reopens else "xb", buffering=0)
        # An earlier start may have been killed inside a line.
        self._waiting = bytearray(b"\n" if path.stat().st_size else b"")
        self.trouble: str | None = None
        """Why records wait in memory; None while the disk takes them."""

    def add(self, record: Record) -> None:
        """Queue a record for the next `flush`, or write it sooner."""
        self._waiting += (json.dumps(record.as_dict(), allow_nan=False) + "\n").encode()
        if len(self._waiting) > _WAITING_BYTES and self.trouble is None:
            self.flush()

    def flush(self, *, durably: bool = False) -> None:
        """Write queued records; `durably` also syncs them to disk.

        Raises:
            Failure: the disk has taken nothing for so long that the queue is full.
        """
        try:
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
            if durably and not self._file.closed:  # a run that never began has closed it
                os.fsync(self._file.fileno())
                sync(self._path.parent)
        except OSError as error:
            self._bear(error)
            return
        if self.trouble is not None:
            tell(f"{self._path} is written again, nothing is missing")
            self.trouble = None

    def rewind(self, step: int) -> None:
        """Roll back records of steps after `step`, which an earlier start has written.

        Raises:
            Failure: the disk has no room for it.
        """
        self.flush()
        self._file.close()
        try:
            rewind(self._path, step)
        finally:  # stopped on the way by a signal or the disk, the run still records its end
            self._file = self._path.open("ab", buffering=0)

    def close(self) -> None:
        """Write queued records and close the file."""
        self.flush()
        self._file.close()

    def _bear(self, error: OSError) -> None:
        trouble = f"{self._path} cannot be written ({error.strerror})"
        if self.trouble is None:
            tell(f"{trouble}: training goes on, and its records wait in memory")
        self.trouble = trouble
        if len(self._waiting) > _MOST_WAITING_BYTES:
            raise Failure(f"{trouble}, and no more records can wait in memory: make room there")


def rewind(path: Path, step: int) -> None:
    """Keep the complete records of a `rank<N>.jsonl` up to `step`.

    Closing records (phases, the test split) are written anew at the run's next end. The file is
    replaced atomically.

    Raises:
        Failure: the disk has no room for it, or went read-only; the file is as it was.
    """
    kept = path.with_name(f".{path.name}.rewinding")
    try:
        with (
            path.open(encoding="utf-8", errors="replace") as old,
            kept.open("w", encoding="utf-8") as new,
        ):
            new.writelines(line for line in old if _stays(line, step))
            new.flush()
            os.fsync(new.fileno())
        kept.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # the room that it took
            kept.unlink()
        raise Failure(
            f"{path} cannot be rolled back to step {step} ({error.strerror}): make room there and "
            "resume again; nothing is lost"
        ) from error


def rewind_others(folder: Path, ranks: int, step: int) -> None:
    """Roll back the files of ranks that only an earlier start had; see `rewind`."""
    for rank, path in rank_files(folder).items():
        if rank >= ranks:
            rewind(path, step)


def rank_files(folder: Path) -> dict[int, Path]:
    """Return rank -> its file, for every rank of an earlier start."""
    found = ((_FILE.fullmatch(path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in found if match}


def _stays(line: str, step: int) -> bool:
    try:
        record = json.loads(line)
        kind, at = record["kind"], record.get("step")
    except (ValueError, KeyError, TypeError, AttributeError):
        return False  # the writer was killed inside this line
    if kind == "phase" or (kind == "eval" and record.get("split") == "test"):
        return False
    return at is None or at <= step
