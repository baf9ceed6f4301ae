"""Ranks as a mesh of data x context x tensor parallelism: which sequences a rank reads, which of
their tokens, and which shards of the matrices it holds."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from launcher.config.sharding import ContextParallelMethod, ShardingChoice


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextRank:
    """Rank `index` of a context-parallel group of `size` ranks."""

    size: int
    index: int
    method: ContextParallelMethod

    def local_ranges(self, seq_len: int) -> list[range]:
        """Return the positions of this rank's tokens in a sequence, in their order.

        Consecutive ones; for ring attention two ranges, of which the later mirrors the earlier:
        causal attention then costs the same on each rank.
        """
        if self.method != "ring":
            count = seq_len // self.size
            return [range(self.index * count, (self.index + 1) * count)]
        count, mirror = seq_len // (2 * self.size), 2 * self.size - 1 - self.index
        return [range(first * count, (first + 1) * count) for first in (self.index, mirror)]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRank:
    """Rank `index` of a tensor-parallel group of `size` ranks."""

    size: int
    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParallelRank:
    """A rank among those that compute one copy of the model together, per dimension of the mesh;
    None where the mesh has a size of 1."""

    context: ContextRank | None = None
    tensor: TensorRank | None = None


WHOLE_MODEL: Final = ModelParallelRank()
"""A rank that computes the model alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """One rank's place in the mesh. Tensor-parallel ranks are adjacent, and so are tensor-parallel
    groups of a context-parallel group: both communicate in every block."""

    data_rank: int
    data_ranks: int
    model: ModelParallelRank

    @classmethod
    def at(cls, rank: int, world_size: int, sharding: ShardingChoice) -> "Mesh":
        """Return the place of rank `rank` of `world_size`."""
        context_size, tensor_size = sharding.context_parallel, sharding.tensor_parallel
        above, tensor_index = divmod(rank, tensor_size)
        data_rank, context_index = divmod(above, context_size)
        context = tensor = None
        if context_size > 1:
            method = sharding.context_parallel_method
            context = ContextRank(size=context_size, index=context_index, method=method)
        if tensor_size > 1:
            tensor = TensorRank(size=tensor_size, index=tensor_index)
        return cls(
            data_rank=data_rank,
            data_ranks=sharding.data_ranks(world_size),
            model=ModelParallelRank(context=context, tensor=tensor),
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Ranks per dimension: data, context, tensor."""
        context, tensor = self.model.context, self.model.tensor
        return (self.data_ranks, context.size if context else 1, tensor.size if tensor else 1)

    @property
    def loss_copies(self) -> int:
        """Ranks that compute the same loss of the same tokens."""
        return 1 if self.model.tensor is None else self.model.tensor.size

    def positions(self, seq_len: int) -> np.ndarray | None:
        """Return the positions of this rank's tokens, int64 [local seq_len]; None for all."""
        context = self.model.context
        return None if context is None else np.concatenate(context.local_ranges(seq_len))


def across_nodes(sharding: ShardingChoice, ranks_per_node: int) -> list[str]:
    """Return a sentence per dimension that communicates in every block and spans several nodes."""
    tensor, context = sharding.tensor_parallel, sharding.context_parallel
    sentences = []
    for what, flag, number, near in (
        ("tensor-parallel", "--tensor-parallel", tensor, 1),
        ("context-parallel", "--context-parallel", context, tensor),
    ):
        if number > 1 and number * near > ranks_per_node:
            within = max(1, ranks_per_node // near)
            sentences.append(
                f"the {number} ranks of a {what} group are on "
                f"{-(-number * near // ranks_per_node)} nodes, and communicate in every block: "
                f"{flag} {within} stays within one"
            )
    return sentences
