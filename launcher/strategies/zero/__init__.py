"""DeepSpeed ZeRO 0 to 3.

engine.py   hands model and optimizer to DeepSpeed    config.py   the config of DeepSpeed
states.py   where DeepSpeed keeps training state      swap.py     and on NVMe, nvme_*.py around it
fraction.py which sub-groups of stage 3 are not offloaded    saved.py   experts that autograd saves
forecast/   its allocations and its traffic; imported by the forecast only
"""

from typing import TYPE_CHECKING, Final

from launcher.strategies.base import TORCH, Fields, Strategy, Variant

if TYPE_CHECKING:
    from launcher.strategies.build_inputs import BuildInputs
    from launcher.strategies.engine import Engine

_OPTIMIZER: dict[str, Fields] = {"+cpu": {"offload_optimizer": "cpu"}}
_BOTH = _OPTIMIZER | {"+cpu+param": {"offload_optimizer": "cpu", "offload_param": "cpu"}}


def build(inputs: "BuildInputs") -> "Engine":
    """Imports deepspeed, which takes its time."""
    from launcher.strategies.zero import engine

    return engine.build(inputs)


ZERO: Final = Strategy(
    name="zero",
    variants=tuple(
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
    ),
    build=build,
    number=lambda chosen: chosen.zero or 0,
    # of the master weights, from stage 1 on; stage 0 computes under autocast
    copies=lambda chosen: chosen.zero != 0,
    keeps_master=True,
    imports_bytes=90 * 2**20,
    follows={"torch": TORCH, "deepspeed": ("0.19",)},
)
