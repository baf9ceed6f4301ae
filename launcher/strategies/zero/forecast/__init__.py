"""Allocations (stages.py, stage3.py, coordinator.py, flat_groups.py) and traffic of DeepSpeed."""

from launcher.forecast.buffers import Buffers
from launcher.forecast.timeline import Timeline
from launcher.forecast.traffic import Hooks, Traffic, Transfer, Wire
from launcher.strategies.rank import Rank
from launcher.strategies.zero.config import has_bf16_optimizer
from launcher.strategies.zero.forecast.stage3 import Zero3
from launcher.strategies.zero.forecast.stages import Bf16Stage1, Zero0, Zero12


def buffers(rank: Rank, timeline: Timeline) -> Buffers:
    """Return the buffers of a stage; bf16 summed up in fp32 has an engine of its own at stage 1."""
    stage = rank.resolved.config.sharding.zero
    if stage == 3:
        return Zero3(rank, timeline)
    if stage == 0:
        return Zero0(rank, timeline)
    own = has_bf16_optimizer(rank.resolved.config)
    return Bf16Stage1(rank, timeline) if own else Zero12(rank, timeline)


def traffic(wire: Wire) -> Traffic:
    """Return the traffic of a stage (deepspeed 0.19.8: runtime/engine.py, runtime/zero/).

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
        whole = tuple(wire.gather_model(element, groups=layers))
        return Traffic(
            forward=whole,
            backward=(*whole, *wire.reduce_model(element, groups=layers)),
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
