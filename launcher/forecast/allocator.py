"""Predict the bytes that torch's CUDA caching allocator reserves for allocations and frees.

A model of the native allocator (c10/cuda/CUDACachingAllocator.cpp) with its default settings: no
max_split_size, no garbage collection threshold, no power-of-two rounding, no CUDA graphs. A block
belongs to the stream that it was allocated on and serves that one only; one that another stream has
used too is taken to be free at once. Among free blocks of one size it takes the lowest address;
here segments lie in the order of their creation, where a driver may hand out addresses in another
one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from launcher.forecast.allocator_blocks import (
    EMPTY_CACHE,
    MemoryBlock,
    Pool,
    growth,
    lowest_with_room,
)
from launcher.util.sizes import (
    K_MIN_BLOCK_SIZE,
    K_SMALL_SIZE,
    rounded_bytes,
    rounded_up,
    segment_bytes,
)

# Address space between segments: blocks of two segments never become neighbours.
_SEGMENT_STRIDE = 2**48

Event = tuple[int, int]
"""(storage id, size in bytes); size 0 frees the storage, or with EMPTY_CACHE all that is cached."""
Streams = Mapping[int, str]
"""Storage id -> the stream that it is allocated on, where that is not the one that computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorUse:
    """Figures of `torch.cuda.memory_stats`, sizes rounded up to blocks."""

    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    retries: int
    """Times that cached segments had to be given back to the device (num_alloc_retries)."""
    out_of_memory: bool
    """A request could not be served, even after all cached segments were given back."""


class CachingAllocator:
    """One device's allocator, to be fed events.

    Args:
        limit_bytes: most it may reserve (`set_per_process_memory_fraction`, or what the device has
            left for it); None = no limit.
        expandable_segments: `PYTORCH_ALLOC_CONF=expandable_segments:True`.
    """

    def __init__(
        self, *, limit_bytes: int | None = None, expandable_segments: bool = False
    ) -> None:
        self._limit_bytes = limit_bytes
        self._expandable = expandable_segments
        self._pools: dict[tuple[str | None, bool], Pool] = {}
        self._live: dict[int, MemoryBlock] = {}
        self._next_address = 0
        self._allocated = self._reserved = 0
        self._peak_allocated = self._peak_reserved = 0
        self._retries = 0
        self._out_of_memory = False

    def replay(
        self, events: Iterable[Event], streams: Streams = MappingProxyType({})
    ) -> AllocatorUse:
        """Serve events in program order, up to the first that runs out of memory."""
        for storage_id, size_bytes in events:
            if storage_id == EMPTY_CACHE:
                self.release_cached()
            elif size_bytes == 0:
                self.free(storage_id)
            elif not self.allocate(storage_id, size_bytes, streams.get(storage_id)):
                break
        return self.use()

    def use(self) -> AllocatorUse:
        """Return what is held now, and was held at most."""
        return AllocatorUse(
            allocated_bytes=self._allocated,
            reserved_bytes=self._reserved,
            peak_allocated_bytes=self._peak_allocated,
            peak_reserved_bytes=self._peak_reserved,
            retries=self._retries,
            out_of_memory=self._out_of_memory,
        )

    def allocate(self, storage_id: int, size_bytes: int, stream: str | None = None) -> bool:
        """Serve one request; False when there is no memory for it."""
        assert storage_id not in self._live, f"storage {storage_id} is allocated twice"
        size = rounded_bytes(size_bytes)
        pool = self._pool(stream, small=size <= K_SMALL_SIZE)
        block = self._from_cache(pool, size) or self._from_device(pool, size)
        if block is None:
            # As torch's malloc after a failed cudaMalloc: give back the cached segments and ask the
            # device once more. The cache is not searched again.
            self._retries += 1
            self.release_cached()
            block = self._from_device(pool, size)
        if block is None:
            self._out_of_memory = True
            return False
        # an unsplit block counts as allocated in full, its unused tail included
        if self._should_split(block, size):
            pool.insert(block.split_off(size))
        block.free = False
        self._live[storage_id] = block
        self._allocated += block.size
        if self._allocated > self._peak_allocated:
            self._peak_allocated = self._allocated
        return True

    def free(self, storage_id: int) -> None:
        """Return a storage's block to its pool, merged with free neighbours."""
        block = self._live.pop(storage_id)
        self._allocated -= block.size
        block.free = True
        block.pool.insert(self._merged(block))

    def release_cached(self) -> None:
        """`torch.cuda.empty_cache`: give back free segments, or the free pages of expandable ones.

        A segment of which any part is in use stays whole.
        """
        for pool in self._pools.values():
            for block in list(pool.at_least(0)):
                if pool.expandable is not None:
                    self._unmap(pool, block)
                # alone it is a whole segment
                elif block.prev is None and block.next is None:
                    pool.remove(block)
                    self._reserved -= block.size

    def _pool(self, stream: str | None, *, small: bool) -> Pool:
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = Pool(small=small)
        return pool

    def _from_cache(self, pool: Pool, size: int) -> MemoryBlock | None:
        """Best fit. The block at an expandable segment's end counts with what it can grow to."""
        block = pool.best_fit(size)
        if block is None:
            return None
        if self._expandable and growth(block):
            for following in pool.at_least(size):
                if following is block:
                    continue
                if following.size + growth(following) >= block.size + growth(block):
                    break
                block = following
        pool.remove(block)
        return block

    def _from_device(self, pool: Pool, size: int) -> MemoryBlock | None:
        # torch's alloc_block holds a whole segment against the limit even where an expandable one
        # would need fewer pages.
        wanted = segment_bytes(size)
        if self._limit_bytes is not None and self._reserved + wanted > self._limit_bytes:
            return None
        if self._expandable:
            return self._expand(pool, size)
        block = MemoryBlock(pool, self._next_address, wanted)
        self._next_address += _SEGMENT_STRIDE
        self._reserve(wanted)
        return block

    def _reserve(self, size: int) -> None:
        self._reserved += size
        self._peak_reserved = max(self._peak_reserved, self._reserved)

    def _should_split(self, block: MemoryBlock, size: int) -> bool:
        remaining = block.size - size
        if block.pool.small or self._expandable:
            return remaining >= K_MIN_BLOCK_SIZE
        # A rest of 1 MiB or less would never be used: requests of that size go to the small pool.
        return remaining > K_SMALL_SIZE

    def _merged(self, block: MemoryBlock) -> MemoryBlock:
        """The block with the neighbours that are free and mapped as it is (out of their pool)."""
        pool, following, previous = block.pool, block.next, block.prev
        if following is not None and following.free and following.mapped == block.mapped:
            if following.mapped:  # unmapped ranges are in no pool
                pool.remove(following)
            block.absorb_next()
        if previous is not None and previous.free and previous.mapped == block.mapped:
            if previous.mapped:
                pool.remove(previous)
            previous.absorb_next()
            return previous
        return block

    def _expand(self, pool: Pool, size: int) -> MemoryBlock | None:
        """Map pages at the lowest address of the expandable segment where `size` bytes fit.

        The limit is checked again for the pages themselves: on a full device mapping them fails.
        """
        if pool.expandable is None:
            pool.expandable = MemoryBlock(pool, self._next_address, _SEGMENT_STRIDE, mapped=False)
            self._next_address += _SEGMENT_STRIDE
        block = lowest_with_room(pool.expandable, size)
        # Count the pages of all holes that the block has to grow through before any is mapped:
        # torch maps them one after the other.
        room = pages = 0
        reach: MemoryBlock | None = block
        while room < size:
            assert reach is not None
            if not reach.mapped:
                pages += min(reach.size, rounded_up(size - room, pool.page_bytes))
            room += reach.size
            reach = reach.next
        if self._limit_bytes is not None and self._reserved + pages > self._limit_bytes:
            return None
        while not block.mapped or block.size < size:
            if block.mapped:
                hole = block.next  # never another free block: adjacent ones are merged
                assert hole is not None
                missing = size - block.size
            else:
                hole, missing = block, size
            block = self._map(hole, missing)
        pool.remove(block)
        return block

    def _map(self, hole: MemoryBlock, size: int) -> MemoryBlock:
        """Back the start of an unmapped block by whole pages; the free block that results."""
        pages = min(hole.size, rounded_up(size, hole.pool.page_bytes))
        if pages < hole.size:
            hole.split_off(pages)
        hole.mapped = True
        self._reserve(pages)
        block = self._merged(hole)
        block.pool.insert(block)
        return block

    def _unmap(self, pool: Pool, block: MemoryBlock) -> None:
        assert pool.expandable is not None
        page, base = pool.page_bytes, pool.expandable.address
        # Only pages that lie in this block as a whole: the edge pages hold parts of blocks in use.
        first = base + rounded_up(block.address - base, page)
        end = base + (block.address - base + block.size) // page * page
        if first >= end:
            return
        pool.remove(block)
        if first > block.address:
            before, block = block, block.split_off(first - block.address)
            pool.insert(before)
        if block.size > end - first:
            pool.insert(block.split_off(end - first))
        block.mapped = False
        self._reserved -= block.size
        self._merged(block)


def replay(
    events: Iterable[Event],
    streams: Streams = MappingProxyType({}),
    *,
    limit_bytes: int | None = None,
    expandable_segments: bool = False,
) -> AllocatorUse:
    """Return what a fresh allocator holds after `events`, and held at most."""
    allocator = CachingAllocator(limit_bytes=limit_bytes, expandable_segments=expandable_segments)
    return allocator.replay(events, streams)
