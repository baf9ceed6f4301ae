"""Blocks and pools of the caching allocator's model."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from launcher.util.sizes import K_LARGE_BUFFER, K_SMALL_BUFFER

_ADDRESS_BITS = 80
"""More than any address has: segments are 2**48 bytes apart."""
EMPTY_CACHE = -1
"""In place of a storage that is freed: `torch.cuda.empty_cache`, as libraries call it."""


class MemoryBlock:
    """A range of a segment, linked to its neighbours there."""

    __slots__ = ("address", "free", "mapped", "next", "pool", "prev", "size")

    def __init__(self, pool: "Pool", address: int, size: int, *, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.mapped = mapped
        self.free = True
        self.prev: MemoryBlock | None = None
        self.next: MemoryBlock | None = None

    def split_off(self, size: int) -> "MemoryBlock":
        """Keep the first `size` bytes; what follows becomes the next block."""
        rest = MemoryBlock(self.pool, self.address + size, self.size - size, mapped=self.mapped)
        self.size = size
        rest.prev, rest.next, self.next = self, self.next, rest
        if rest.next is not None:
            rest.next.prev = rest
        return rest

    def absorb_next(self) -> None:
        """Take the following block's bytes; it ceases to exist."""
        absorbed = self.next
        assert absorbed is not None
        self.size += absorbed.size
        self.next = absorbed.next
        if self.next is not None:
            self.next.prev = self


class Pool:
    """The small or the large pool: its free, mapped blocks ordered by size, then by address."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.page_bytes = K_SMALL_BUFFER if small else K_LARGE_BUFFER
        self.expandable: MemoryBlock | None = None
        """First block of the pool's expandable segment, once there is one."""
        # By one number each: a plan comes here millions of times, and tuples compare slowly.
        self._order: list[int] = []
        self._blocks: dict[int, MemoryBlock] = {}

    def insert(self, block: MemoryBlock) -> None:
        """A free block."""
        # Size above address in one number: sorted as by torch's BlockComparatorSize.
        place = block.size << _ADDRESS_BITS | block.address
        insort(self._order, place)
        self._blocks[place] = block

    def remove(self, block: MemoryBlock) -> None:
        """One that is free no longer, or not with this size."""
        place = block.size << _ADDRESS_BITS | block.address
        del self._order[bisect_left(self._order, place)]
        del self._blocks[place]

    def best_fit(self, size: int) -> MemoryBlock | None:
        """The smallest free block of `size` bytes or more."""
        number = bisect_left(self._order, size << _ADDRESS_BITS)
        return self._blocks[self._order[number]] if number < len(self._order) else None

    def at_least(self, size: int) -> Iterator[MemoryBlock]:
        """Free blocks of `size` bytes or more, best fit first."""
        for number in range(bisect_left(self._order, size << _ADDRESS_BITS), len(self._order)):
            yield self._blocks[self._order[number]]


def growth(block: MemoryBlock) -> int:
    """Unmapped bytes that follow a block of an expandable segment."""
    following = block.next
    return following.size if following is not None and not following.mapped else 0


def lowest_with_room(first: MemoryBlock, size: int) -> MemoryBlock:
    """Return the lowest free range of at least `size` bytes, among those with unmapped space."""
    block: MemoryBlock | None = first
    while block is not None:
        # A free block without a hole behind it cannot grow, and `best_fit` found it too small.
        if block.free and (not block.mapped or growth(block)):
            room = 0
            reach: MemoryBlock | None = block
            while reach is not None and reach.free and room < size:
                room += reach.size
                reach = reach.next
            if room >= size:
                return block
        block = block.next
    raise AssertionError("the address space of an expandable segment never ends")
