"""DeepSpeed ZeRO 0 to 3.

engine.py   hands model and optimizer to DeepSpeed    config.py   what DeepSpeed is told
states.py   where DeepSpeed keeps training state      swap.py     and on NVMe, nvme_*.py around it
memory.py   what stages 0 to 2 allocate               memory3.py  and stage 3
fraction.py which sub-groups of stage 3 are not offloaded
"""

from launcher.config.schema import RunConfig
from launcher.config.sharding import ShardingChoice
from launcher.memory.timeline import Timeline
from launcher.optim.dtypes import Dtypes, dtypes
from launcher.strategies.base import TORCH, Fields, Strategy, Variant
from launcher.strategies.buffers import Buffers
from launcher.strategies.engine import Engine, Recipe
from launcher.strategies.rank import Rank
from launcher.strategies.traffic import Hooks, Traffic, Transfer, Wire
from launcher.strategies.zero.config import has_bf16_optimizer
from launcher.strategies.zero.memory import Bf16Stage1, Zero0, Zero12
from launcher.strategies.zero.memory3 import Zero3

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

    def build(self, recipe: Recipe) -> Engine:
        """Imports deepspeed, which takes its time."""
        from launcher.strategies.zero.engine import build

        return build(recipe)

    def memory(self, rank: Rank, timeline: Timeline) -> Buffers:
        """By stage; bf16 with fp32 accumulation has an engine of its own at stage 1."""
        stage = rank.resolved.config.sharding.zero
        if stage == 3:
            return Zero3(rank, timeline)
        if stage == 0:
            return Zero0(rank, timeline)
        own = has_bf16_optimizer(rank.resolved.config)
        return Bf16Stage1(rank, timeline) if own else Zero12(rank, timeline)

    def traffic(self, wire: Wire) -> Traffic:
        """By stage (deepspeed 0.19.8: runtime/engine.py, runtime/zero/).

        0: engine.buffered_allreduce_fallback after the last backward, in fp32.
        1: all-reduce (use_multi_rank_bucket_allreduce, not a reduce-scatter) of whole gradients in
        communication_data_type, the parameters' type, once per step; then the updated parameters
        are gathered. BF16_Optimizer reduces after the backward.
        2: the same in every micro-batch: what is not this rank's part is dropped.
        3: parameters gathered for each forward and backward, gradients reduce-scattered, in every
        micro-batch (stage3.py). Biases and norms stay whole, and are left out here.
        """
        stage, element, layers = wire.sharding.zero, wire.computed_bytes, wire.model.layers
        trained = wire.model.trained_parameter_count
        if stage == 0:
            every = wire.stored_bytes * trained
            sent = Transfer(kind="all_reduce", size_bytes=every, hideable=False)
            return Traffic(last_backward=(sent,))
        if stage == 3:
            whole = tuple(wire.gather_model(element))
            return Traffic(
                forward=whole,
                backward=(*whole, *wire.reduce_model(element)),
                hooks=Hooks(modules=wire.modules, gradients=wire.tensors),
            )
        hideable = not has_bf16_optimizer(wire.config)
        reduced = wire.all_reduce(element, pieces=layers, hideable=hideable)
        backward = (*reduced, *wire.gradients_to_host())
        updated = Transfer(
            kind="all_gather", size_bytes=element * trained, pieces=layers, hideable=False
        )
        # Reduced, and at stage 2 kept in parts of buckets besides.
        hooks = Hooks(gradients=(2 if stage == 2 else 1) * wire.tensors)
        if stage == 1:
            return Traffic(last_backward=backward, step=(updated,), hooks=hooks)
        return Traffic(backward=backward, step=(updated,), hooks=hooks)
