"""Sizes that torch's allocators round requests to.

The constants carry the names they have in c10/cuda/CUDACachingAllocator.cpp.
"""

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
    """round_size: what a request occupies."""
    return -(-size_bytes // K_MIN_BLOCK_SIZE) * K_MIN_BLOCK_SIZE or K_MIN_BLOCK_SIZE


def segment_bytes(rounded: int) -> int:
    """get_allocation_size: what is asked of the device when no free block fits."""
    if rounded <= K_SMALL_SIZE:
        return K_SMALL_BUFFER
    if rounded < K_MIN_LARGE_ALLOC:
        return K_LARGE_BUFFER
    return rounded_up(rounded, K_ROUND_LARGE)


def rounded_up(size: int, multiple: int) -> int:
    """The next multiple of `multiple`."""
    return -(-size // multiple) * multiple


def page_locked_bytes(size_bytes: int) -> int:
    """What torch's allocator of page-locked host memory takes for a tensor: powers of two
    (ATen/core/CachingHostAllocator.h)."""
    return 1 << (size_bytes - 1).bit_length()
