"""Allocations (buffers.py, by sharded_groups.py) and traffic of FSDP2."""

import math

from launcher.forecast.traffic import Hooks, Traffic, Transfer, Wire
from launcher.strategies.fsdp.forecast.buffers import FsdpBuffers
from launcher.strategies.fsdp.grouping import ROOT, block_groups, reshards
from launcher.strategies.fsdp.placement import sharded_dimension
from launcher.strategies.parameters import parameter_shapes

buffers = FsdpBuffers


def traffic(wire: Wire) -> Traffic:
    """Gathers and reduce-scatters.

    Each group (grouping.py) is gathered in the compute type before its forward, one group ahead,
    and after a reshard again before its backward; gradients are reduced in the type they are stored
    in, and with --replicate all-reduced across the replicas, in the last micro-batch or in each
    (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).
    """
    sharding, model = wire.sharding, wire.model
    reshard = sharding.reshard_after_forward
    root_again = reshards(ROOT, reshard_after_forward=reshard, tied=model.tied)
    element = wire.resting_bytes  # shards move as they are stored, and are cast on the device
    block_bytes = int(wire.computed_bytes * wire.blocks / model.layers)
    sizes_bytes, together = [block_bytes] * model.layers, not wire.of_another_trainer
    groups = len(block_groups(sizes_bytes, wire.device_type, together=together))
    again = _copied_again(wire)
    forward = (*wire.gather_model(element, groups=groups), *again)
    embeddings, blocks = wire.embeddings if root_again else 0, wire.blocks if reshard else 0
    backward = (
        *wire.gather(embeddings, pieces=1, host_element=element, hideable=False),
        *wire.gather(blocks, pieces=groups, host_element=element),
        *(again if reshard else ()),
    )
    reduce = (*wire.reduce_model(wire.stored_bytes, groups=groups), *again)
    hooks = Hooks(groups=groups + (1 if model.tied else 2))  # and the root, and a head of its own
    if sharding.reduce_each_micro_batch:
        return Traffic(forward=forward, backward=(*backward, *reduce), hooks=hooks)
    return Traffic(forward=forward, backward=backward, last_backward=reduce, hooks=hooks)


def _copied_again(wire: Wire) -> tuple[Transfer, ...]:
    """Experts that are divided within (placement.py), gathered or before they are reduced."""
    if wire.of_another_trainer:
        return ()
    shapes = parameter_shapes(wire.model).values()
    elements = sum(math.prod(s) for s in shapes if sharded_dimension(s, wire.shard_ranks) > 0)
    copied = Transfer(kind="copy", size_bytes=2 * wire.computed_bytes * elements, hideable=False)
    return (copied,) if elements else ()
