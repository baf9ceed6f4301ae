"""A group of parameters as FSDP's memory sees it: what of it is there at the moment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.forecast.trace.allocation_summaries import EMPTY, AllocationSummary, summarize
from launcher.strategies.fsdp.grouping import groups_of, reshards
from launcher.strategies.parameters import Parameter


@dataclass(slots=True)
class ShardedGroup:
    """Parameters that are gathered and reduced together."""

    name: str
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


def grouped(
    parameters: Sequence[Parameter], *, tied: bool, reshard_after_forward: bool
) -> dict[str, ShardedGroup]:
    """Return the groups by name, in the order of their first parameters."""
    groups: dict[str, ShardedGroup] = {}
    for p, name in zip(parameters, groups_of((p.name for p in parameters), tied=tied), strict=True):
        if name not in groups:
            own = reshards(name, reshard_after_forward=reshard_after_forward, tied=tied)
            groups[name] = ShardedGroup(name, [], own)
        groups[name].parameters.append(p)
    return groups
