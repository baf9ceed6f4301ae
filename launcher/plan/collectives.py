"""How long transfers take: what a strategy sends, over the links of a machine."""

import dataclasses
import math
from dataclasses import dataclass

from launcher.config.resolve import Resolved
from launcher.errors import UserError
from launcher.optim.dtypes import dtypes
from launcher.plan.machine import Machine
from launcher.plan.work import block_input_bytes
from launcher.strategies import strategy_of
from launcher.strategies.traffic import Collective, Transfer, Wire


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks that communicate; `per_node` of them on each node that they touch."""

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        """Nodes that the group touches."""
        return math.ceil(self.size / self.per_node)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedTransfer:
    """Seconds on a link; `hideable` where computation can go on meanwhile."""

    seconds: float
    hideable: bool


def sent_bytes(kind: Collective, size_bytes: float, ranks: int) -> float:
    """Bytes each rank sends in a ring collective over a tensor of `size_bytes` in all.

    (n-1)/n of it for all-gather and reduce-scatter, and an all-reduce is one after the other
    (Patarasu and Yuan, Bandwidth optimal all-reduce algorithms, 2009; nccl-tests PERFORMANCE.md).
    """
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks * size_bytes


def collective_s(
    machine: Machine, group: Group, kind: Collective, size_bytes: float, *, pieces: float = 1
) -> float:
    """Seconds of a collective over `size_bytes` in all, issued in `pieces`.

    Bytes: those a rank sends, over the bus bandwidth. Across nodes NCCL runs a ring through each
    GPU's own network link, so that a ring's share of the bytes crosses each of them: the group has
    the links of all its ranks on a node together. Latency: a ring's hops within the node and a
    tree's between nodes (hwLat of NCCL's src/graph/tuning.cc; double trees since NCCL 2.4).

    Raises:
        UserError: the machine was profiled by one process, which has nobody to talk to.
    """
    if group.size == 1:
        return 0.0
    if machine.collectives is None:
        raise UserError(
            f"the profile of {machine.name} was measured by 1 process and knows no collectives: "
            "measure again with shardscale profile --nproc 2 or more"
        )
    rate = machine.collectives[kind]
    passes = 2 if kind == "all_reduce" else 1
    bandwidth = rate.bytes_per_s
    start_s = rate.start_s + passes * (min(group.size, group.per_node) - 1) * rate.hop_s
    if group.nodes > 1:
        bandwidth = min(bandwidth, machine.network_bytes_per_s * group.per_node)
        start_s += passes * math.ceil(math.log2(group.nodes)) * machine.network_hop_s
    return pieces * start_s + sent_bytes(kind, size_bytes, group.size) / bandwidth


def shard_and_replica_groups(
    *, world_size: int, replicate: int, ranks_per_node: int
) -> tuple[Group, Group]:
    """The two groups of a rank in a (replicate, shard) mesh: shards are neighbours."""
    shards = world_size // replicate
    per_node = min(shards, ranks_per_node)
    return (
        Group(size=shards, per_node=per_node),
        Group(size=replicate, per_node=min(replicate, max(1, ranks_per_node // shards))),
    )


def timed(
    resolved: Resolved, *, world_size: int, ranks_per_node: int, machine: Machine
) -> dict[str, tuple[TimedTransfer, ...]]:
    """The transfers of one rank by part of a step: the parts of `Traffic`."""
    config = resolved.config
    wire = Wire(config.sharding, resolved.model, dtypes(config.optim), world_size=world_size)
    shard, replica = shard_and_replica_groups(
        world_size=world_size,
        replicate=config.sharding.replicate,
        ranks_per_node=ranks_per_node,
    )
    found = strategy_of(config).traffic(wire)
    parts = {
        part.name: tuple(
            TimedTransfer(
                seconds=transfer_s(machine, transfer, replica if transfer.replicas else shard),
                hideable=transfer.hideable,
            )
            for transfer in getattr(found, part.name)
        )
        for part in dataclasses.fields(found)
    }
    away, back = activation_transfers(resolved, machine)
    parts["forward"] += away
    parts["backward"] += back
    return parts


def transfer_s(machine: Machine, transfer: Transfer, group: Group) -> float:
    """Seconds of one transfer; on a CPU host and device are the same memory, and moving between
    them is nothing."""
    if transfer.kind == "copy":
        return transfer.size_bytes / machine.copy_bytes_per_s
    if transfer.kind == "to_device" or transfer.kind == "to_host":
        to_device = transfer.kind == "to_device"
        rate = (
            machine.host_to_device_bytes_per_s if to_device else machine.device_to_host_bytes_per_s
        )
        return 0.0 if rate is None else transfer.size_bytes / rate
    return collective_s(machine, group, transfer.kind, transfer.size_bytes, pieces=transfer.pieces)


def activation_transfers(
    resolved: Resolved, machine: Machine
) -> tuple[tuple[TimedTransfer, ...], tuple[TimedTransfer, ...]]:
    """Block inputs to host memory in a forward and back in a backward, beside other blocks' work
    (model/offload.py)."""
    away, back = machine.device_to_host_bytes_per_s, machine.host_to_device_bytes_per_s
    model = resolved.model
    if model.activation_checkpointing != "offload" or away is None or back is None:
        return (), ()
    size = model.layers * block_input_bytes(resolved)
    return (
        (TimedTransfer(seconds=size / away, hideable=True),),
        (TimedTransfer(seconds=size / back, hideable=True),),
    )
