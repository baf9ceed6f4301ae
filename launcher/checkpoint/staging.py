"""Host memory for snapshots of this rank's training state, which a thread writes to disk."""

from collections.abc import Iterable

import torch
from torch import Tensor

from launcher.strategies.flat_shards import MASK, Shard
from launcher.util.sizes import page_locked_bytes

BLOCK_ELEMENTS = 2**26
"""256 MiB of fp32. torch rounds page-locked memory up to a power of two, so that one buffer for
everything could take almost twice what it holds."""


class Staging:
    """Blocks of host memory for one snapshot, made by the first and reused by the next.

    Args:
        shards: what `copy` will be called with. Page-locked where they are on a GPU.
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
        elements, self._pinned = 0, False
        for shard in shards:  # one at a time: states in low precision are decoded copies
            if shard.kind != MASK:
                elements += shard.data.numel()
                self._pinned |= shard.data.is_cuda
        whole, rest = divmod(elements, BLOCK_ELEMENTS)
        self._sizes = [BLOCK_ELEMENTS] * whole + [rest] * (rest > 0)
        self._blocks: list[Tensor] = []

    @property
    def size_bytes(self) -> int:
        """Host memory of all blocks, as torch allocates it."""
        sizes = [4 * elements for elements in self._sizes]
        return sum(map(page_locked_bytes, sizes) if self._pinned else sizes)

    def copy(self, shards: Iterable[Shard]) -> list[Shard]:
        """Copy the shards; complete on return, so that the next step may change the originals.

        A shard that crosses the end of a block becomes several. Masks never change and are not
        copied.
        """
        if not self._blocks:
            self._blocks = [
                torch.empty(elements, dtype=torch.float32, pin_memory=self._pinned)
                for elements in self._sizes
            ]
        staged: list[Shard] = []
        number = filled = 0
        for shard in shards:
            if shard.kind == MASK:
                staged.append(shard)
                continue
            begin = 0
            while begin < shard.data.numel():
                if filled == len(self._blocks[number]):
                    number, filled = number + 1, 0
                free = self._blocks[number][filled:]
                end = min(shard.data.numel(), begin + len(free))
                copied = free[: end - begin]
                copied.copy_(shard.data[begin:end], non_blocking=True)
                for first, places in shard.places.pieces(begin, end):
                    data = copied[first - begin :][: places.numel]
                    staged.append(Shard.at(places, name=shard.name, kind=shard.kind, data=data))
                filled += len(copied)
                begin = end
        if self._pinned:
            torch.cuda.synchronize()
        return staged
