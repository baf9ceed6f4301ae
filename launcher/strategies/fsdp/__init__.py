"""FSDP2: parameters, gradients and optimizer states sharded over the ranks.

engine.py   builds it
grouping.py which parameters are gathered and reduced together
memory.py   what it allocates
traffic.py  what it sends
"""

from collections.abc import Mapping

from launcher.config.schema import ShardingChoice
from launcher.memory.timeline import Timeline
from launcher.strategies.base import TORCH, Variant
from launcher.strategies.buffers import Buffers
from launcher.strategies.engine import Engine, Recipe
from launcher.strategies.fsdp.memory import FsdpBuffers
from launcher.strategies.fsdp.traffic import fsdp_traffic
from launcher.strategies.rank import Rank
from launcher.strategies.traffic import Traffic, Wire

# FSDP2 moves both or none.
_OFFLOADS = {"+cpu": {"offload_optimizer": "cpu", "offload_param": "cpu"}}
_FULL = Variant(
    label="fsdp",
    also_called="ZeRO-3",
    fields={"strategy": "fsdp"},
    level=3,
    offloads=_OFFLOADS,
)
_GRAD_OP = Variant(
    label="fsdp-grad-op",
    also_called="ZeRO-2",
    fields={"strategy": "fsdp", "reshard_after_forward": False},
    level=2,
    offloads=_OFFLOADS,
    plans_offload=False,
)
_HYBRID = Variant(
    label="fsdp-hybrid",
    also_called="ZeRO-3 in groups, replicated",
    fields={"strategy": "fsdp"},
    level=3,
    replicates=True,
    offloads=_OFFLOADS,
    plans_offload=False,
)


class Fsdp:
    """`--strategy fsdp`."""

    name = "fsdp"
    variants: tuple[Variant, ...] = (_FULL, _GRAD_OP, _HYBRID)
    needs_group = True
    keeps_master = False
    imports_bytes = 0
    follows: Mapping[str, tuple[str, ...]] = {"torch": TORCH}

    def variant(self, sharding: ShardingChoice) -> Variant:
        """Hybrid where it replicates, else by what happens after the forward."""
        if sharding.replicate > 1:
            return _HYBRID
        return _FULL if sharding.reshard_after_forward else _GRAD_OP

    def casts_parameters(self, sharding: ShardingChoice) -> bool:
        """As it gathers them."""
        return True

    def build(self, recipe: Recipe) -> Engine:
        """Imports DTensor, and with it sympy: only where it is used."""
        from launcher.strategies.fsdp.engine import build

        return build(recipe)

    def memory(self, rank: Rank, timeline: Timeline) -> Buffers:
        """Shards, and whole groups while they compute."""
        return FsdpBuffers(rank, timeline)

    def traffic(self, wire: Wire) -> Traffic:
        """Gathers and reduce-scatters."""
        return fsdp_traffic(wire)
