"""The ranks as data x sequence x tensor: who reads which sequences, and which part of them."""

from dataclasses import dataclass

import numpy as np

from launcher.config.sharding import ContextParallelMethod, ShardingChoice
from launcher.parallel.world import Place


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextRank:
    """A rank's part of every sequence: `index` of `ranks`."""

    ranks: int
    index: int
    method: ContextParallelMethod

    def pieces(self, seq_len: int) -> list[range]:
        """Which tokens of a sequence the rank has, in their order.

        Consecutive ones; for ring attention two pieces, of which the later is the earlier one's
        mirror image: causal attention costs as much for each rank then.
        """
        if self.method != "ring":
            count = seq_len // self.ranks
            return [range(self.index * count, (self.index + 1) * count)]
        count, mirror = seq_len // (2 * self.ranks), 2 * self.ranks - 1 - self.index
        return [range(first * count, (first + 1) * count) for first in (self.index, mirror)]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRank:
    """A rank's part of every matrix: `index` of `ranks`."""

    ranks: int
    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """One rank's place in it. Ranks that share matrices are neighbours, and so are such groups that
    share sequences: both talk in every block."""

    data_rank: int
    data_ranks: int
    part: ContextRank | None
    """None where every rank has whole sequences."""
    share: TensorRank | None
    """None where every rank has, or gathers, whole matrices."""

    @classmethod
    def of(cls, place: Place, sharding: ShardingChoice) -> "Mesh":
        """Where a process is in the mesh of its run."""
        return cls.at(place.rank, place.size, sharding)

    @classmethod
    def at(cls, rank: int, world_size: int, sharding: ShardingChoice) -> "Mesh":
        """Where a rank of so many is."""
        sequence, tensor = sharding.context_parallel, sharding.tensor_parallel
        above, index = divmod(rank, tensor)
        data_rank, slot = divmod(above, sequence)
        return cls(
            data_rank=data_rank,
            data_ranks=sharding.data_ranks(world_size),
            part=None
            if sequence == 1
            else ContextRank(ranks=sequence, index=slot, method=sharding.context_parallel_method),
            share=None if tensor == 1 else TensorRank(ranks=tensor, index=index),
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Ranks in each dimension: data, sequence, tensor."""
        return (
            self.data_ranks,
            1 if self.part is None else self.part.ranks,
            1 if self.share is None else self.share.ranks,
        )

    def positions(self, seq_len: int) -> np.ndarray | None:
        """Which tokens of a sequence this rank has, int64 [seq_len / ranks]; None for all."""
        return None if self.part is None else np.concatenate(self.part.pieces(seq_len))


def across_nodes(sharding: ShardingChoice, ranks_per_node: int) -> list[str]:
    """One sentence for each kind of ranks that talk in every block, and are on several nodes."""
    tensor, sequence = sharding.tensor_parallel, sharding.context_parallel
    sentences = []
    for what, flag, number, near in (
        ("matrix", "--tensor-parallel", tensor, 1),
        ("sequence", "--context-parallel", sequence, tensor),
    ):
        if number > 1 and number * near > ranks_per_node:
            within = max(1, ranks_per_node // near)
            sentences.append(
                f"the {number} ranks of a {what} are on {-(-number * near // ranks_per_node)} "
                f"nodes, and talk in every block: {flag} {within} stays within one"
            )
    return sentences
