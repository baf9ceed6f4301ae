"""Sequential speed of a disk, with direct I/O if the file system allows it."""

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from launcher.util.sizes import MIB

_BLOCK_BYTES: Final = 8 * MIB
_LONGEST_S: Final = 4.0
"""Per direction, which is enough to recognise a slow disk."""


def disk_rates(folder: Path, size_bytes: int) -> tuple[float, float, bool]:
    """Return bytes/s written (with fsync), bytes/s read, and whether the page cache was
    bypassed."""
    block = mmap.mmap(-1, _BLOCK_BYTES)  # page-aligned, as direct I/O requires
    block.write(os.urandom(_BLOCK_BYTES))
    with tempfile.NamedTemporaryFile(prefix=".shardscale-speed-", dir=folder) as made:
        file, direct = _open(made.name)
        try:
            started_s = time.monotonic()
            written = _repeat(lambda: os.write(file, block), size_bytes)
            os.fsync(file)
            write_s = time.monotonic() - started_s
            os.lseek(file, 0, os.SEEK_SET)
            if not direct:  # else the reads below would measure the page cache
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            started_s = time.monotonic()
            read = _repeat(lambda: os.readv(file, [block]), written)
            read_s = time.monotonic() - started_s
        finally:
            os.close(file)
    return written / write_s, read / read_s, direct


def _open(path: str) -> tuple[int, bool]:
    """Open for direct I/O if possible; returns the file and whether it is direct."""
    with contextlib.suppress(OSError):  # tmpfs and some overlays lack it
        return os.open(path, os.O_RDWR | os.O_DIRECT), True
    return os.open(path, os.O_RDWR), False


def _repeat(move: Callable[[], int], size_bytes: int) -> int:
    """Repeat `move` until `size_bytes` or the time limit is reached; returns bytes moved."""
    moved, end_s = 0, time.monotonic() + _LONGEST_S
    while moved < size_bytes and time.monotonic() < end_s:
        moved += move()
    return moved
