"""What FSDP2 sends.

Each group is gathered in the compute type before its forward, one group ahead, and after a reshard
again before its backward; gradients are reduced in the type they are stored in, and with
--replicate all-reduced across the replicas, in the last micro-batch or in each
(torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).
"""

from launcher.strategies.fsdp.grouping import ROOT, reshards
from launcher.strategies.traffic import Traffic, Wire


def fsdp_traffic(wire: Wire) -> Traffic:
    """The transfers of one rank."""
    sharding, model = wire.sharding, wire.model
    reshard = sharding.reshard_after_forward
    root_again = reshards(ROOT, reshard_after_forward=reshard, tied=model.tied)
    block = wire.blocks / model.layers
    host = wire.stored_bytes  # the shard moves as it is stored, and is cast on the device
    forward = (
        *wire.gather(wire.embeddings + block, pieces=2, host_element=host, hideable=False),
        *wire.gather(wire.blocks - block + wire.head, pieces=model.layers, host_element=host),
    )
    backward = (
        *wire.gather(
            wire.embeddings if root_again else 0, pieces=1, host_element=host, hideable=False
        ),
        *wire.gather(wire.blocks if reshard else 0, pieces=model.layers, host_element=host),
    )
    element = wire.stored_bytes
    reduce = (
        *wire.reduce_scatter(wire.blocks + wire.head, element, pieces=model.layers),
        *wire.reduce_scatter(wire.embeddings, element, pieces=1, hideable=False),
        *wire.gradients_to_host(),
    )
    if sharding.reduce_each_micro_batch:
        return Traffic(forward=forward, backward=(*backward, *reduce))
    return Traffic(forward=forward, backward=backward, last_backward=reduce)
