"""A group of parameters as FSDP's memory sees it: what of it is there at the moment."""

import math
from collections import Counter
from dataclasses import dataclass

from launcher.forecast.trace.allocation_summaries import EMPTY, AllocationSummary, summarize
from launcher.model.parts import block_of
from launcher.optim.registry import OPTIMIZERS
from launcher.strategies.fsdp.grouping import Group, block_groups, groups_of, reshards
from launcher.strategies.fsdp.placement import shard_shapes, sharded_dimension
from launcher.strategies.parameters import Parameter
from launcher.strategies.rank import Rank


@dataclass(frozen=True)
class Division:
    """The division of a rank's parameters among those it shards with."""

    rank: Rank
    ranks: int
    index: int
    """Its place among them."""

    def is_rearranged(self, p: Parameter) -> bool:
        """Not its first dimension is divided: it is copied once more when it was gathered, and
        before it is reduced."""
        return self._dimension(p) > 0

    def shape(self, p: Parameter) -> tuple[int, ...]:
        """Return the shape of the rank's shard."""
        return self._shapes(p)[0]

    def padded(self, *parameters: Parameter) -> int:
        """Elements of shards, with padding."""
        return sum(math.prod(self._shapes(p)[1]) for p in parameters)

    def whole_bytes(self, *parameters: Parameter) -> int:
        """Bytes as they compute, gathered with their padding."""
        return self.ranks * sum(self.rank.computing_bytes(p) * self.padded(p) for p in parameters)

    def decayed_bytes(self, p: Parameter) -> int:
        """Bytes of the copy of a gradient to which weight decay is added."""
        choice = self.rank.resolved.config.optim
        is_decayed = len(p.shape) >= 2 and choice.recipe().weight_decay != 0
        copies = OPTIMIZERS[choice.optimizer].copies_to_decay and is_decayed
        return copies * self.rank.stored_bytes * math.prod(self.shape(p))

    def _dimension(self, p: Parameter) -> int:
        # other trainers leave it to torch
        another = self.rank.resolved.of_another_trainer
        return 0 if another else sharded_dimension(p.shape, self.ranks)

    def _shapes(self, p: Parameter) -> tuple[tuple[int, ...], tuple[int, ...]]:
        dimension = self._dimension(p)
        return shard_shapes(p.shape, rank=self.index, ranks=self.ranks, dimension=dimension)


@dataclass(slots=True)
class ShardedGroup:
    """Parameters that are gathered and reduced together."""

    of: Group
    parameters: list[Parameter]
    reshard: bool
    gathered: bool = False
    gathering: bool = False
    accumulated: bool = False
    copied_out: AllocationSummary = EMPTY
    """Bytes of its whole parameters, where they are gathered from others."""
    released: AllocationSummary = EMPTY

    @property
    def trained(self) -> list[Parameter]:
        """Those that are reduced."""
        return [p for p in self.parameters if p.trained]

    def sum_up(self, division: Division, *, whole_blocks: bool) -> None:
        """Note its whole parameters as they come and go."""
        sizes = {p.name: division.whole_bytes(p) for p in self.parameters}
        again = [p.name for p in self.parameters if division.is_rearranged(p)]
        copied: list[tuple[tuple[str, str], int, int, str]] = []
        for name, size in sizes.items():
            copied.append((("whole", name), size, size, "temporary"))
            if name in again:
                copied.append((("gathered", name), size, size, "temporary"))
        copied += [(("gathered", name), 0, -sizes[name], "temporary") for name in again]
        self.copied_out = summarize(copied, whole_blocks=whole_blocks)
        self.released = summarize(
            ((("whole", name), 0, -size, "temporary") for name, size in sizes.items()),
            whole_blocks=whole_blocks,
        )


def grouped(rank: Rank) -> list[ShardedGroup]:
    """Return the groups of a rank's parameters, in the order of their first ones."""
    tied, sharding = rank.resolved.model.tied, rank.resolved.config.sharding
    sizes_bytes: Counter[int] = Counter()
    for p in rank.parameters:
        if (layer := block_of(p.name)) is not None:
            sizes_bytes[layer] += rank.computing_bytes(p) * p.elements
    together = not rank.resolved.of_another_trainer
    blocks = block_groups([*sizes_bytes.values()], rank.device_type, together=together)
    found: dict[Group, ShardedGroup] = {}
    groups = groups_of((p.name for p in rank.parameters), blocks, tied=tied)
    for p, of in zip(rank.parameters, groups, strict=True):
        if of not in found:
            after_forward = sharding.reshard_after_forward
            own = reshards(of, reshard_after_forward=after_forward, tied=tied)
            found[of] = ShardedGroup(of, [], own)
        found[of].parameters.append(p)
    return [*found.values()]
