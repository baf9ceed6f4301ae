"""The ranks as data x sequence: who reads which sequences, and which part of them."""

from dataclasses import dataclass

import numpy as np

from launcher.config.sharding import SequenceMethod, ShardingChoice
from launcher.parallel.world import Place


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A rank's part of every sequence: `index` of `ranks`."""

    ranks: int
    index: int
    method: SequenceMethod

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


def part_of(rank: int, sharding: ShardingChoice) -> Slice | None:
    """What a rank has of each of its sequences, -1 for the last rank; None for all of them."""
    ranks = sharding.sequence_parallel
    if ranks == 1:
        return None
    return Slice(ranks=ranks, index=rank % ranks, method=sharding.sequence_method)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """One rank's place in it. Ranks of one sequence are neighbours."""

    data_rank: int
    data_ranks: int
    part: Slice | None
    """None where every rank has whole sequences."""

    @classmethod
    def of(cls, place: Place, sharding: ShardingChoice) -> "Mesh":
        """Where a process is in the mesh of its run."""
        return cls(
            data_rank=place.rank // sharding.sequence_parallel,
            data_ranks=sharding.data_ranks(place.size),
            part=part_of(place.rank, sharding),
        )

    def positions(self, seq_len: int) -> np.ndarray | None:
        """Which tokens of a sequence this rank has, int64 [seq_len / ranks]; None for all."""
        return None if self.part is None else np.concatenate(self.part.pieces(seq_len))
