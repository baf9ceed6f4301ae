"""Room for runs and the corpus cache; speed and suitability of a folder for NVMe offload."""

import contextlib
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from launcher.data.cache import default_cache_dir
from launcher.strategies.zero.nvme_folder import file_system
from launcher.tools.doctor.finding import Finding, fail, not_applicable, ok, warn
from launcher.util.files import nearest_existing
from launcher.util.sizes import GIB, MIB, gib

LITTLE_DISK_BYTES = 5 * GIB
LITTLE_NVME_BYTES = 20 * GIB
TEST_BYTES = 256 * MIB
BLOCK_BYTES = 8 * MIB
LONGEST_S = 4.0  # per direction; a slow disk is known by then
SLOW_BYTES_PER_S = 1e9


def disk_space() -> Finding:
    """Room where runs and tokenised corpora go."""
    places = {"here": Path.cwd(), "corpus cache": nearest_existing(default_cache_dir())}
    free = {name: shutil.disk_usage(path).free for name, path in places.items()}
    found = ", ".join(f"{gib(size)} free ({name})" for name, size in free.items())
    if min(free.values()) < LITTLE_DISK_BYTES:
        return warn(
            found,
            "a checkpoint takes 12 bytes per parameter; saving may fail",
            "free some space, or give --out and SHARDSCALE_CACHE on another disk",
        )
    return ok(found)


def nvme(folder: Path | None) -> Finding:
    """Write and read 256 MiB past the page cache where that is possible."""
    if folder is None:
        return not_applicable("not tested; give --nvme-path FOLDER to measure a disk for offload")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return fail(
            f"{folder} is not a folder that can be written",
            "offload to it does not work",
            f"mkdir -p {folder}, or choose another --nvme-path",
        )
    free, kind = shutil.disk_usage(folder).free, file_system(folder)
    if free < 2 * TEST_BYTES:
        return fail(
            f"{folder}: {gib(free)} free", "no room for offload", "choose another --nvme-path"
        )
    write, read, direct = measure(folder)
    found = (
        f"{folder} ({kind}): {gib(free)} free, writes {write / 1e9:.2f} GB/s, reads "
        f"{read / 1e9:.2f} GB/s" + ("" if direct else " (through the page cache)")
    )
    problems = []
    if kind in ("tmpfs", "ramfs"):
        problems.append("it is memory, not a disk: offload would save nothing")
    elif kind.startswith(("nfs", "lustre", "cifs", "fuse")):
        problems.append("it is a network file system, and every rank's steps wait for it")
    elif min(write, read) < SLOW_BYTES_PER_S:
        problems.append("each step moves about 12 bytes per offloaded parameter both ways")
    if free < LITTLE_NVME_BYTES:
        problems.append(
            f"room for about {free / 16e9:.1f} billion parameters with their Adam states"
        )
    if problems:
        return warn(found, "; ".join(problems), "choose a folder on a local NVMe disk")
    return ok(found)


def measure(folder: Path) -> tuple[float, float, bool]:
    """(bytes/s written, bytes/s read, whether the page cache was bypassed)."""
    block = mmap.mmap(-1, BLOCK_BYTES)  # aligned to pages, as direct I/O wants it
    block.write(os.urandom(BLOCK_BYTES))
    with tempfile.NamedTemporaryFile(prefix=".shardscale-speed-", dir=folder) as made:
        file, direct = _open(made.name)
        try:
            started_s = time.monotonic()
            written = _repeat(lambda: os.write(file, block), TEST_BYTES)
            os.fsync(file)
            write_s = time.monotonic() - started_s
            os.lseek(file, 0, os.SEEK_SET)
            if not direct and sys.platform == "linux":
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            started_s = time.monotonic()
            read = _repeat(lambda: os.readv(file, [block]), written)
            read_s = time.monotonic() - started_s
        finally:
            os.close(file)
    return written / write_s, read / read_s, direct


def _open(path: str) -> tuple[int, bool]:
    """(file, whether it goes past the page cache)."""
    if hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):  # tmpfs and some overlays refuse it
            return os.open(path, os.O_RDWR | os.O_DIRECT), True
    return os.open(path, os.O_RDWR), False


def _repeat(move: Callable[[], int], size_bytes: int) -> int:
    """Bytes that were moved, which are fewer than asked for where that takes too long."""
    moved, end_s = 0, time.monotonic() + LONGEST_S
    while moved < size_bytes and time.monotonic() < end_s:
        moved += move()
    return moved
