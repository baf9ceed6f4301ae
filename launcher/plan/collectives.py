"""What the ranks send each other in a step, and how long it takes: by strategy, as ours really do.

Which collectives run, in which type and how often, was read in the strategies here and in torch's
and DeepSpeed's sources; each docstring says which.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from launcher.config.resolve import Resolved
from launcher.errors import UserError
from launcher.model.config import ModelConfig
from launcher.plan.machine import Collective, Machine
from launcher.plan.work import block_input_bytes

DDP_BUCKET_BYTES = 25 * 2**20
"""bucket_cap_mb of DistributedDataParallel."""


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
class Transfer:
    """Seconds on a link; `hideable` where computation can go on meanwhile."""

    seconds: float
    hideable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """A rank's transfers: in each micro-batch's forward and backward, once more in the last
    backward of a step, and in the optimizer step."""

    forward: tuple[Transfer, ...] = ()
    backward: tuple[Transfer, ...] = ()
    last_backward: tuple[Transfer, ...] = ()
    step: tuple[Transfer, ...] = ()


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


def traffic(
    resolved: Resolved, *, world_size: int, ranks_per_node: int, machine: Machine
) -> Traffic:
    """The transfers of one rank."""
    planner = _Planner(resolved, machine, world_size=world_size, ranks_per_node=ranks_per_node)
    found, (away, back) = planner.between_ranks(), activation_transfers(resolved, machine)
    return replace(found, forward=(*found.forward, *away), backward=(*found.backward, *back))


def activation_transfers(
    resolved: Resolved, machine: Machine
) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """Block inputs to host memory in a forward and back in a backward, beside other blocks' work
    (model/offload.py)."""
    away, back = machine.device_to_host_bytes_per_s, machine.host_to_device_bytes_per_s
    model = resolved.model
    if model.activation_checkpointing != "offload" or away is None or back is None:
        return (), ()
    size = model.layers * block_input_bytes(resolved)
    return (
        (Transfer(seconds=size / away, hideable=True),),
        (Transfer(seconds=size / back, hideable=True),),
    )


def embedding_parameters(model: ModelConfig) -> int:
    """Token and position embedding: used first, so their gradients are complete last."""
    return (model.vocab_size + model.context) * model.d_model


class _Planner:
    def __init__(
        self, resolved: Resolved, machine: Machine, *, world_size: int, ranks_per_node: int
    ) -> None:
        config, model = resolved.config, resolved.model
        self.sharding = config.sharding
        self.model = model
        self.machine = machine
        self.shard, self.replica = shard_and_replica_groups(
            world_size=world_size,
            replicate=config.sharding.replicate,
            ranks_per_node=ranks_per_node,
        )
        self.low_bytes = 4 if config.optim.precision == "fp32" else 2
        self.pure = config.optim.precision == "bf16-pure"
        self.blocks = model.layers * model.block_parameter_count
        self.embeddings = embedding_parameters(model)
        self.head = 0 if model.tied else model.vocab_size * model.d_model

    def between_ranks(self) -> Traffic:
        """What the run's strategy sends."""
        if self.sharding.strategy == "zero":
            assert self.sharding.zero is not None
            return (self.zero_0, self.zero_1, self.zero_2, self.zero_3)[self.sharding.zero]()
        if self.sharding.strategy == "fsdp":
            return self.fsdp()
        return self.ddp() if self.sharding.strategy == "ddp" else Traffic()

    def ddp(self) -> Traffic:
        """All-reduce of the gradients, in the parameters' type (fp32 under autocast), in the last
        backward, in buckets of 25 MiB as they fill (torch/csrc/distributed/c10d/reducer.cpp). The
        embeddings' bucket fills last: nothing is left to hide it behind."""
        element = 2 if self.pure else 4
        before = element * (self.blocks + self.head)
        buckets = max(1.0, before / DDP_BUCKET_BYTES)
        return Traffic(
            last_backward=(
                self._collective("all_reduce", before, pieces=buckets),
                self._collective("all_reduce", element * self.embeddings, hideable=False),
            )
        )

    def fsdp(self) -> Traffic:
        """A group per block, one for the root, one for an untied head (strategies/fsdp.py). Each is
        gathered in the compute type before its forward, one group ahead, and after a reshard again
        before its backward; gradients are reduced in fp32, and with --replicate all-reduced across
        the replicas, in the last micro-batch or in each
        (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py)."""
        sharding, model = self.sharding, self.model
        reshard = sharding.reshard_after_forward
        again = self.embeddings if reshard and not model.tied else 0
        block = self.blocks / model.layers
        forward = (
            *self._gather(self.embeddings + block, pieces=2, hideable=False),
            *self._gather(self.blocks - block + self.head, pieces=model.layers),
        )
        backward = [
            *self._gather(again, pieces=1, hideable=False),
            *self._gather(self.blocks if reshard else 0, pieces=model.layers),
        ]
        element = 2 if self.pure else 4
        reduce = (
            *self._reduce(self.blocks + self.head, element, pieces=model.layers),
            *self._reduce(self.embeddings, element, pieces=1, hideable=False),
            *self._to_host(),
        )
        if sharding.reduce_each_micro_batch:
            return Traffic(forward=forward, backward=(*backward, *reduce))
        return Traffic(forward=forward, backward=tuple(backward), last_backward=reduce)

    def zero_0(self) -> Traffic:
        """engine.buffered_allreduce_fallback after the last backward, in fp32."""
        every = 4 * self.model.parameter_count
        return Traffic(last_backward=(self._collective("all_reduce", every, hideable=False),))

    def zero_1(self) -> Traffic:
        """All-reduce (use_multi_rank_bucket_allreduce, not a reduce-scatter) of whole gradients in
        communication_data_type, the parameters' type, once per step; then the updated parameters
        are gathered. With bf16 and fp32 accumulation BF16_Optimizer reduces after the backward."""
        late = self.low_bytes == 2 and self.sharding.grad_accum_dtype == "fp32"
        reduce = (*self._zero_reduce(hideable=not late), *self._to_host())
        return Traffic(last_backward=reduce, step=self._update())

    def zero_2(self) -> Traffic:
        """As stage 1, but in every micro-batch: what is not this rank's part is dropped."""
        reduce = (*self._zero_reduce(hideable=True), *self._to_host())
        return Traffic(backward=reduce, step=self._update())

    def zero_3(self) -> Traffic:
        """Parameters gathered for each forward and backward, gradients reduce-scattered, in every
        micro-batch (deepspeed/runtime/zero/stage3.py). Biases and norms stay whole, and are left
        out here."""
        layers = self.model.layers
        block = self.blocks / layers
        whole = (
            *self._gather(self.embeddings + block, pieces=2, hideable=False),
            *self._gather(self.blocks - block + self.head, pieces=layers),
        )
        return Traffic(
            forward=whole,
            backward=(
                *whole,
                *self._reduce(self.blocks + self.head, self.low_bytes, pieces=layers),
                *self._reduce(self.embeddings, self.low_bytes, pieces=1, hideable=False),
                *self._to_host(),
            ),
        )

    def _zero_reduce(self, *, hideable: bool) -> tuple[Transfer, ...]:
        layers = self.model.layers
        before = self.low_bytes * (self.blocks + self.head)
        return (
            self._collective("all_reduce", before, pieces=layers, hideable=hideable),
            self._collective("all_reduce", self.low_bytes * self.embeddings, hideable=False),
        )

    def _update(self) -> tuple[Transfer, ...]:
        size, buckets = self.low_bytes * self.model.parameter_count, self.model.layers
        return (self._collective("all_gather", size, pieces=buckets, hideable=False),)

    def _collective(
        self, kind: Collective, size: float, *, pieces: float = 1, hideable: bool = True
    ) -> Transfer:
        seconds = collective_s(self.machine, self.shard, kind, size, pieces=pieces)
        return Transfer(seconds=seconds, hideable=hideable)

    def _gather(
        self, parameters: float, *, pieces: int, hideable: bool = True
    ) -> Iterator[Transfer]:
        """Gather parameters; from host memory first where they live there, and copied out of the
        gathered buffer afterwards (read and written once)."""
        size = self.low_bytes * parameters
        if size == 0:
            return
        yield self._collective("all_gather", size, pieces=pieces, hideable=hideable)
        yield Transfer(seconds=2 * size / self.machine.copy_bytes_per_s, hideable=False)
        rate = self.machine.host_to_device_bytes_per_s
        if self.sharding.offload_param != "none" and rate is not None:
            # FSDP moves its fp32 shard and casts it there; ZeRO moves what it computes in.
            element = 4 if self.sharding.strategy == "fsdp" else self.low_bytes
            shard = element * parameters / self.shard.size
            yield Transfer(seconds=shard / rate, hideable=hideable)

    def _reduce(
        self, parameters: float, element: int, *, pieces: int, hideable: bool = True
    ) -> Iterator[Transfer]:
        """Copy gradients into the buffer, reduce-scatter them, all-reduce the shards across
        replicas."""
        size = element * parameters
        yield Transfer(seconds=2 * size / self.machine.copy_bytes_per_s, hideable=False)
        yield self._collective("reduce_scatter", size, pieces=pieces, hideable=hideable)
        shard = size / self.shard.size
        across = collective_s(self.machine, self.replica, "all_reduce", shard, pieces=pieces)
        yield Transfer(seconds=across, hideable=hideable)

    def _to_host(self) -> Iterator[Transfer]:
        """This rank's share of the gradients, in fp32, to where an offloaded optimizer is."""
        rate = self.machine.device_to_host_bytes_per_s
        if self.sharding.offload_optimizer != "none" and rate is not None:
            own = self.model.parameter_count / self.shard.size
            yield Transfer(seconds=4 * own / rate, hideable=True)
