"""DeepSpeed ZeRO 0 to 3.

engine.py   hands model and optimizer to DeepSpeed    config.py   the config of DeepSpeed
states.py   where DeepSpeed keeps training state      swap.py     and on NVMe, nvme_*.py around it
fraction.py which sub-groups of stage 3 are not offloaded    saved.py   experts that autograd saves
forecast/   its allocations and its traffic; imported by the forecast only
"""

from typing import TYPE_CHECKING

from launcher.config.schema import RunConfig
from launcher.config.sharding import ShardingChoice
from launcher.optim.dtypes import Dtypes, dtypes
from launcher.strategies.base import TORCH, Fields, Strategy, Variant

if TYPE_CHECKING:
    from launcher.strategies.build_inputs import BuildInputs
    from launcher.strategies.engine import Engine

_OPTIMIZER: dict[str, Fields] = {"+cpu": {"offload_optimizer": "cpu"}}
_BOTH = _OPTIMIZER | {"+cpu+param": {"offload_optimizer": "cpu", "offload_param": "cpu"}}


class Zero(Strategy):
    """`--zero 0` to `--zero 3`."""

    name = "zero"
    variants = tuple(
        Variant(
            label=f"zero{stage}",
            also_called=also_called,
            fields={"strategy": "zero", "zero": stage},
            level=stage,
            complexity=1 + stage,
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
    keeps_master = True
    imports_bytes = 90 * 2**20
    follows = {"torch": TORCH, "deepspeed": ("0.19",)}  # noqa: RUF012

    def variant(self, sharding: ShardingChoice) -> Variant:
        """The stage's."""
        assert sharding.zero is not None
        return self.variants[sharding.zero]

    def dtypes(self, config: RunConfig) -> Dtypes:
        """Copies of the master weights from stage 1 on; stage 0 computes under autocast."""
        return dtypes(config.optim, copies=config.sharding.zero != 0)

    def build(self, inputs: "BuildInputs") -> "Engine":
        """Imports deepspeed, which takes its time."""
        from launcher.strategies.zero.engine import build

        return build(inputs)
