"""A group of parameters as FSDP's memory sees it: what of it is there at the moment."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.forecast.trace.allocation_summaries import EMPTY, AllocationSummary, summarize
from launcher.model.parts import block_of
from launcher.strategies.fsdp.grouping import Group, block_groups, groups_of, reshards
from launcher.strategies.parameters import Parameter
from launcher.strategies.rank import Rank


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

    def sum_up(self, sizes: Mapping[tuple[str, str], int], *, whole_blocks: bool) -> None:
        """Note its whole parameters, of these bytes, as they come and go."""
        self.copied_out = summarize(
            ((key, size, size, "temporary") for key, size in sizes.items()),
            whole_blocks=whole_blocks,
        )
        self.released = summarize(
            ((key, 0, -size, "temporary") for key, size in sizes.items()),
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
