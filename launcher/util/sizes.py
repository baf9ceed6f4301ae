"""Bytes as text and as torch's allocators round them, and durations. GiB is 2^30, GB is 10^9.

The constants K_... carry their names of c10/cuda/CUDACachingAllocator.cpp.
"""

import re

from launcher.util.errors import UserError

MIB, GIB = 2**20, 2**30
MOST_BYTES = 2**60  # more than any machine has
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
UNITS |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}  # as Slurm and ulimit read them
_FEWEST_PLAIN_BYTES = 4096  # a plain number below this is the GiB that a GPU is sold with


def parse_bytes(text: str, flag: str) -> int:
    """`24GiB`, `24G`, `512 MiB`, `80GB` or plain bytes -> bytes; a small plain number is in GiB.

    Raises:
        UserError: not a size, or not more than nothing.
    """
    match = re.fullmatch(r" *([0-9]+(?:\.[0-9]+)?) *([A-Za-z]*) *", text)
    unit = UNITS.get(match[2].upper()) if match else None
    if match and not match[2] and float(match[1]) < _FEWEST_PLAIN_BYTES:
        unit = GIB
    size = float(match[1]) * unit if match and unit else 0
    if not 1 <= size < MOST_BYTES:
        raise UserError(f"{flag} {text!r} is not a size: write for example 24GiB or 512MiB")
    return int(size)


def counted(number: int, noun: str) -> str:
    """Return `1 rank`, `2 ranks`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def gib(size_bytes: int | None) -> str:
    """Format bytes in the unit that fits (`3.20GiB`, `512.0MiB`); `n/a` if unknown."""
    if size_bytes is None:
        return "n/a"
    if abs(size_bytes) >= GIB - 2**20 // 20:  # what 1024.0MiB would be rounded from
        return f"{size_bytes / GIB:.2f}GiB"
    if abs(size_bytes) >= 2**20:
        return f"{size_bytes / 2**20:.1f}MiB"
    if abs(size_bytes) >= 2**10:
        return f"{size_bytes / 2**10:.1f}KiB"
    return f"{size_bytes}B" if size_bytes else "0"


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3.4 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def even_part(total: int, index: int, parts: int) -> tuple[int, int]:
    """Return [begin, end) of part `index` of `total` elements, split over `parts` as evenly as
    possible; the last part is one of the largest."""
    return total * index // parts, total * (index + 1) // parts


K_MIN_BLOCK_SIZE = 512
"""kMinBlockSize: every request is rounded up to a multiple of this."""
K_SMALL_SIZE = 2**20
"""kSmallSize: requests up to this size come from the small pool, others from the large one."""
K_SMALL_BUFFER = 2 * 2**20
"""kSmallBuffer: a segment of the small pool, and the page of its expandable segment."""
K_MIN_LARGE_ALLOC = 10 * 2**20
"""kMinLargeAlloc: large requests below this share segments of kLargeBuffer."""
K_LARGE_BUFFER = 20 * 2**20
"""kLargeBuffer (large_segment_size): such a segment, and the page of an expandable one."""
K_ROUND_LARGE = 2 * 2**20
"""kRoundLarge: requests from kMinLargeAlloc on get a segment of their own, rounded up to this."""


def rounded_bytes(size_bytes: int) -> int:
    """Return the bytes that a request occupies (round_size)."""
    return -(-size_bytes // K_MIN_BLOCK_SIZE) * K_MIN_BLOCK_SIZE or K_MIN_BLOCK_SIZE


def segment_bytes(rounded: int) -> int:
    """Return the bytes requested from the device if no free block fits (get_allocation_size)."""
    if rounded <= K_SMALL_SIZE:
        return K_SMALL_BUFFER
    if rounded < K_MIN_LARGE_ALLOC:
        return K_LARGE_BUFFER
    return rounded_up(rounded, K_ROUND_LARGE)


def rounded_up(size: int, multiple: int) -> int:
    """Return the next multiple of `multiple`."""
    return -(-size // multiple) * multiple


def page_locked_bytes(size_bytes: int) -> int:
    """Return the page-locked host memory of a tensor: powers of two
    (ATen/core/CachingHostAllocator.h)."""
    return 1 << (size_bytes - 1).bit_length()
