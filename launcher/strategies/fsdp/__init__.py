"""FSDP2: parameters, gradients and optimizer states sharded over the ranks.

engine.py   builds it
grouping.py which parameters are gathered and reduced together
memory.py   what it allocates, group by group (groups.py)
"""

from dataclasses import replace
from typing import Any

from launcher.config.schema import RunConfig
from launcher.config.sharding import ShardingChoice
from launcher.memory.timeline import Timeline
from launcher.optim.dtypes import Dtypes, dtypes
from launcher.strategies.base import Strategy, Variant
from launcher.strategies.buffers import Buffers
from launcher.strategies.engine import Engine, Recipe
from launcher.strategies.fsdp.grouping import ROOT, reshards
from launcher.strategies.fsdp.memory import FsdpBuffers
from launcher.strategies.rank import Rank
from launcher.strategies.traffic import Hooks, Traffic, Wire

_FULL = Variant(
    label="fsdp",
    also_called="ZeRO-3",
    fields={"strategy": "fsdp"},
    level=3,
    complexity=2,  # beside ZeRO-1
    # FSDP2 moves both or none.
    offloads={"+cpu": {"offload_optimizer": "cpu", "offload_param": "cpu"}},
    sharded_accumulation={"reduce_each_micro_batch": True},
)
_GRAD_OP = replace(
    _FULL,
    label="fsdp-grad-op",
    also_called="ZeRO-2",
    fields={"strategy": "fsdp", "reshard_after_forward": False},
    level=2,
    complexity=3,
    plans_offload=False,
)
_IN_GROUPS: dict[str, Any] = {"replicates": True, "plans_offload": False}
_HYBRID = replace(
    _FULL,
    label="fsdp-hybrid",
    also_called="ZeRO-3 in groups, replicated",
    complexity=3,
    **_IN_GROUPS,
)
_HYBRID_GRAD_OP = replace(
    _GRAD_OP,
    label="fsdp-hybrid-grad-op",
    also_called="ZeRO-2 in groups, replicated",
    complexity=4,
    **_IN_GROUPS,
)


class Fsdp(Strategy):
    """`--strategy fsdp`."""

    name = "fsdp"
    variants = (_FULL, _GRAD_OP, _HYBRID, _HYBRID_GRAD_OP)

    def variant(self, sharding: ShardingChoice) -> Variant:
        """By whether it replicates, and what happens after the forward."""
        full, grad_op = (_HYBRID, _HYBRID_GRAD_OP) if sharding.replicate > 1 else (_FULL, _GRAD_OP)
        return full if sharding.reshard_after_forward else grad_op

    def dtypes(self, config: RunConfig) -> Dtypes:
        """Parameters are cast as they are gathered."""
        return dtypes(config.optim, copies=True)

    def build(self, recipe: Recipe) -> Engine:
        """Imports DTensor, and with it sympy: only where it is used."""
        from launcher.strategies.fsdp.engine import build

        return build(recipe)

    def memory(self, rank: Rank, timeline: Timeline) -> Buffers:
        """Shards, and whole groups while they compute."""
        return FsdpBuffers(rank, timeline)

    def traffic(self, wire: Wire) -> Traffic:
        """Gathers and reduce-scatters.

        Each group is gathered in the compute type before its forward, one group ahead, and after a
        reshard again before its backward; gradients are reduced in the type they are stored in, and
        with --replicate all-reduced across the replicas, in the last micro-batch or in each
        (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).
        """
        sharding, model = wire.sharding, wire.model
        reshard = sharding.reshard_after_forward
        root_again = reshards(ROOT, reshard_after_forward=reshard, tied=model.tied)
        element = wire.resting_bytes  # shards move as they are stored, and are cast on the device
        forward = tuple(wire.gather_model(element))
        embeddings, blocks = wire.embeddings if root_again else 0, wire.blocks if reshard else 0
        backward = (
            *wire.gather(embeddings, pieces=1, host_element=element, hideable=False),
            *wire.gather(blocks, pieces=model.layers, host_element=element),
        )
        reduce = tuple(wire.reduce_model(wire.stored_bytes))
        hooks = Hooks(groups=model.layers + 1)
        if sharding.reduce_each_micro_batch:
            return Traffic(forward=forward, backward=(*backward, *reduce), hooks=hooks)
        return Traffic(forward=forward, backward=backward, last_backward=reduce, hooks=hooks)
