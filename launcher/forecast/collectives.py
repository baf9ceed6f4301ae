"""Predict the seconds of a strategy's transfers over the links of a machine."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from launcher.config.resolve import Resolved
from launcher.config.sharding import ShardingChoice
from launcher.forecast.dimensions import sequence_transfers, tensor_transfers
from launcher.forecast.machine import Machine, Rate
from launcher.forecast.predict import block_input_bytes
from launcher.forecast.traffic import Collective, GroupName, Traffic, Transfer
from launcher.util.errors import UserError

PARTS: Final = ("forward", "backward", "last_backward", "step")
"""Parts of a `Traffic`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks that communicate; `per_node` of them on each node that they touch."""

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        """Nodes that the group touches."""
        return math.ceil(self.size / self.per_node)


TimedTransfer = tuple[float, bool]
"""Seconds on a link, and True where computation can go on meanwhile."""


def sent_bytes(kind: Collective, size_bytes: float, ranks: int) -> float:
    """Bytes each rank sends in a ring collective over a tensor of `size_bytes` in all.

    (n-1)/n of it for all-gather, reduce-scatter and all-to-all (there `size_bytes` is what each
    rank has), and an all-reduce is one after the other
    (Patarasu and Yuan, Bandwidth optimal all-reduce algorithms, 2009; nccl-tests PERFORMANCE.md).
    """
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks * size_bytes


def fit_rate(
    kind: Collective, sizes_bytes: Sequence[int], seconds: Sequence[float], *, ranks: int
) -> Rate:
    """Latency and bandwidth that fit measured times best, each point weighted by its own time.

    One number of ranks cannot tell a start from hops: the latency is spread evenly over both.
    """
    sent = [sent_bytes(kind, size, ranks) for size in sizes_bytes]
    # relative errors, or the largest size alone would decide
    fit = np.polyfit(sent, seconds, deg=1, w=1 / np.array(seconds))
    s_per_byte, latency_s = fit.tolist()
    if latency_s < 0 or s_per_byte <= 0:  # noise: the largest size says most about bandwidth
        latency_s, s_per_byte = 0.0, seconds[-1] / sent[-1]
    passes = 2 if kind == "all_reduce" else 1
    part_s = latency_s / (1 + passes * (ranks - 1))
    return Rate(start_s=part_s, hop_s=part_s, bytes_per_s=1 / s_per_byte)


def collective_s(
    machine: Machine, group: Group, kind: Collective, size_bytes: float, *, pieces: float = 1
) -> float:
    """Seconds of a collective over `size_bytes` in all, issued in `pieces`.

    Bytes: those a rank sends, over the bus bandwidth. Across nodes NCCL runs a ring through each
    GPU's own network link, so that a ring's share of the bytes crosses each of them: the group has
    the links of all its ranks on a node together. Latency: a ring's hops, of which one for each
    node crosses the network; an all-reduce across nodes takes a tree where that is shorter (hwLat
    of NCCL's src/graph/tuning.cc; double trees since NCCL 2.4, for all-reduce only).

    Raises:
        UserError: the machine was profiled by one process, which sends nothing.
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
    across_s = (group.nodes - 1) * machine.network_hop_s
    hops_s = (group.size - group.nodes) * rate.hop_s + across_s
    if group.nodes > 1:
        bandwidth = min(bandwidth, machine.network_bytes_per_s * group.per_node)
        if kind == "all_reduce":
            # NCCL's tree spans the nodes, on each of which the ranks are a chain
            levels_s = math.ceil(math.log2(group.nodes)) * machine.network_hop_s
            hops_s = min(hops_s, (group.per_node - 1) * rate.hop_s + levels_s)
    start_s = rate.start_s + passes * hops_s
    return pieces * start_s + sent_bytes(kind, size_bytes, group.size) / bandwidth


def groups_of(
    sharding: ShardingChoice, *, world_size: int, ranks_per_node: int
) -> dict[GroupName, Group]:
    """The groups of a rank: ranks that share matrices are neighbours, then those of a sequence;
    shards are neighbours among those with the same parts of matrices, then replicas."""
    tensor, sequence = sharding.tensor_parallel, sharding.context_parallel
    alike = max(1, ranks_per_node // tensor)  # with the same parts of matrices, on a node
    shards = sharding.shard_ranks(world_size) // sharding.replicate

    def group(size: int, most: int) -> Group:
        return Group(size=size, per_node=min(size, most))

    return {
        "shard": group(shards, alike),
        # A node holds as many replicas as groups of shards.
        "replica": group(sharding.replicate, max(1, alike // shards)),
        "sequence": group(sequence, alike),
        "tensor": group(tensor, ranks_per_node),
    }


def timed(
    resolved: Resolved, traffic: Traffic, groups: Mapping[GroupName, Group], machine: Machine
) -> dict[str, list[TimedTransfer]]:
    """The transfers of one rank by part of a step: the parts of `Traffic`."""
    parts: dict[str, list[Transfer]] = {name: [*getattr(traffic, name)] for name in PARTS}
    if resolved.model.activation_checkpointing == "offload":
        # Block inputs, beside other blocks' work (model/offload.py).
        size_bytes = resolved.model.layers * block_input_bytes(resolved)
        parts["forward"].append(Transfer(kind="to_host", size_bytes=size_bytes))
        parts["backward"].append(Transfer(kind="to_device", size_bytes=size_bytes))
    for sent in (sequence_transfers(resolved), tensor_transfers(resolved)):
        for name, some in sent.items():
            parts[name] += some
    return {
        name: [(transfer_s(machine, each, groups[each.among]), each.hideable) for each in some]
        for name, some in parts.items()
    }


def transfer_s(machine: Machine, transfer: Transfer, group: Group) -> float:
    """Seconds of one transfer; on a CPU host and device are the same memory, and moving between
    them is nothing."""
    rate: float | None
    match transfer.kind:
        case "copy":
            rate = machine.copy_bytes_per_s
        case "to_device":
            rate = machine.host_to_device_bytes_per_s
        case "to_host":
            rate = machine.device_to_host_bytes_per_s
        case kind:
            return collective_s(machine, group, kind, transfer.size_bytes, pieces=transfer.pieces)
    return 0.0 if rate is None else transfer.size_bytes / rate
