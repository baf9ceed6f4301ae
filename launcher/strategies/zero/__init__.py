"""DeepSpeed ZeRO 0 to 3.

engine.py   hands model and optimizer to DeepSpeed    config.py   what DeepSpeed is told
shards.py   training state as flat ranges             states.py   where DeepSpeed keeps it
swap.py     states on NVMe, nvme_*.py around it
memory.py   what stages 0 to 2 allocate               memory3.py  and stage 3
traffic.py  what each stage sends
"""

from collections.abc import Mapping

from launcher.config.schema import ShardingChoice
from launcher.memory.timeline import Timeline
from launcher.strategies.base import TORCH, Fields, Variant
from launcher.strategies.buffers import Buffers
from launcher.strategies.engine import Engine, Recipe
from launcher.strategies.rank import Rank
from launcher.strategies.traffic import Traffic, Wire
from launcher.strategies.zero.memory import zero_buffers
from launcher.strategies.zero.traffic import zero_traffic

_OPTIMIZER: dict[str, Fields] = {"+cpu": {"offload_optimizer": "cpu"}}
_BOTH = _OPTIMIZER | {"+cpu+param": {"offload_optimizer": "cpu", "offload_param": "cpu"}}


class Zero:
    """`--zero 0` to `--zero 3`."""

    name = "zero"
    variants: tuple[Variant, ...] = tuple(
        Variant(
            label=f"zero{stage}",
            also_called=also_called,
            fields={"strategy": "zero", "zero": stage},
            level=stage,
            offloads=offloads,
            fetches_by_module=stage == 3,
            planned=stage > 0,  # stage 0 is DDP
        )
        for stage, (also_called, offloads) in enumerate(
            (
                ("DDP", {}),
                ("optimizer sharding", _OPTIMIZER),
                ("FSDP shard grad op", _OPTIMIZER),
                ("FSDP full shard", _BOTH),
            )
        )
    )
    needs_group = True
    keeps_master = True
    imports_bytes = 90 * 2**20
    follows: Mapping[str, tuple[str, ...]] = {"torch": TORCH, "deepspeed": ("0.19",)}

    def variant(self, sharding: ShardingChoice) -> Variant:
        """The stage's."""
        assert sharding.zero is not None
        return self.variants[sharding.zero]

    def casts_parameters(self, sharding: ShardingChoice) -> bool:
        """From stage 1 on; stage 0 computes under autocast."""
        return sharding.zero != 0

    def build(self, recipe: Recipe) -> Engine:
        """Imports deepspeed, which takes its time."""
        from launcher.strategies.zero.engine import build

        return build(recipe)

    def memory(self, rank: Rank, timeline: Timeline) -> Buffers:
        """By stage."""
        return zero_buffers(rank, timeline)

    def traffic(self, wire: Wire) -> Traffic:
        """By stage."""
        return zero_traffic(wire)
