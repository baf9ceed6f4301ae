"""What DeepSpeed's stages 0 to 2 hold and allocate, as engine.py sets them up.

Sizes and order follow deepspeed 0.19.8: runtime/engine.py, runtime/bf16_optimizer.py and
runtime/zero/stage_1_and_2.py.
"""

from launcher.memory.parameters import Parameter
from launcher.memory.timeline import Tag, Timeline
from launcher.memory.trace_events import Key
from launcher.strategies.buffers import Buffers, Whole, tag
from launcher.strategies.rank import FP32, Rank
from launcher.strategies.zero.config import build_config
from launcher.strategies.zero.groups import (
    Groups,
    allocate_master,
    allocate_optimizer,
    flatten_model,
)
from launcher.strategies.zero.memory3 import Zero3

ALLREDUCE_ELEMENTS = 500_000_000  # the engine's own bucket, at stage 0 and in BF16_Optimizer
FP64 = 8  # gradient norms of ZeRO's own are summed in it


def zero_buffers(rank: Rank, timeline: Timeline) -> Buffers:
    """The buffers of a stage; bf16 with fp32 accumulation has an engine of its own at stage 1."""
    sharding = rank.resolved.config.sharding
    if sharding.zero == 3:
        return Zero3(rank, timeline)
    if sharding.zero == 0:
        return Zero0(rank, timeline)
    if sharding.zero == 1 and rank.accumulates_in_fp32 and sharding.offload_optimizer == "none":
        return Bf16Stage1(rank, timeline)
    return Zero12(rank, timeline)


class Zero0(Whole):
    """Gradients are flattened, summed over the ranks and copied back."""

    def end_backward(self) -> None:
        if self.last:
            elements = sum(p.elements for p in self.parameters)
            flat = Tag("temporary", "flattened gradients", (elements,), "float32")
            self.timeline.allocate("flat", FP32 * min(elements, ALLREDUCE_ELEMENTS), flat)
            self.timeline.free("flat")


class Bf16Stage1(Whole):
    """deepspeed's BF16_Optimizer: whole fp32 gradients beside whole bf16 ones."""

    def __init__(self, rank: Rank, timeline: Timeline) -> None:
        super().__init__(rank, timeline)
        self.groups = Groups(rank)

    def build(self) -> None:
        flatten_model(self.timeline, self.groups, element=2)
        for number, partition in enumerate(self.groups.partitions):
            allocate_master(self.timeline, number, partition, element=2, where="device")
        elements = self.groups.padded
        whole = Tag("grads", "fp32 gradients", (elements,), "float32")
        self.timeline.allocate("fp32 gradients", FP32 * elements, whole)

    def end_backward(self) -> None:
        largest = max(p.elements for p in self.parameters)
        self.timeline.allocate("in fp32", FP32 * largest, Tag("temporary", "gradient in fp32"))
        self.timeline.free("in fp32")
        if self.last:
            elements = min(self.groups.padded, ALLREDUCE_ELEMENTS)
            flat = Tag("temporary", "flattened gradients", (elements,), "float32")
            self.timeline.allocate("flat", FP32 * elements, flat)
            self.timeline.allocate("flat in bf16", 2 * elements, flat._replace(dtype="bfloat16"))
            self.timeline.free("flat in bf16")
            self.timeline.free("flat")

    def step(self) -> None:
        for number, partition in enumerate(self.groups.partitions):
            allocate_optimizer(self.timeline, self.rank, number, partition, where="device")
        self.drop_gradients()


class Zero12(Whole):
    """Stages 1 and 2: gradients pass through a bucket, and each rank keeps those of its part."""

    def __init__(self, rank: Rank, timeline: Timeline) -> None:
        super().__init__(rank, timeline)
        resolved = rank.resolved
        config = build_config(
            resolved.config,
            resolved.model,
            accumulation=resolved.accumulation,
            world_size=rank.world_size,
        )["zero_optimization"]
        self.groups = Groups(rank)
        self.shards_gradients = config["stage"] == 2
        self.overlaps = bool(config["overlap_comm"])
        self.bucket = int(config["reduce_bucket_size"])
        self.where = rank.optimizer_where
        self.offloaded = self.where != "device"
        self.element = 2 if rank.low else FP32
        self.stored = rank.stored_bytes
        # bf16 gradients are added up in an fp32 copy of this rank's part.
        self.in_fp32 = rank.accumulates_in_fp32
        # Stage 1 has no parts of its own for that: it adds up whole gradients in fp32.
        self.whole_in_fp32 = self.in_fp32 and not self.shards_gradients
        self.bucket_element = FP32 if self.whole_in_fp32 else self.element
        self.accumulates_on_host = resolved.accumulation > 1 and self.shards_gradients
        self.in_bucket: list[Parameter] = []
        self.filled = 0

    def build(self) -> None:
        timeline, rank_part = self.timeline, Tag("grads", "gradients of this rank's part")
        flatten_model(timeline, self.groups, element=self.element)
        for number, partition in enumerate(self.groups.partitions):
            allocate_master(
                timeline,
                number,
                partition,
                element=self.element,
                stored=self.stored,
                where=self.where,
            )
            if self.offloaded:
                staged = Tag("temporary", "updated part on its way", (partition,))
                timeline.allocate(
                    ("staged", number), self.element * partition, staged, where="host"
                )
        largest = max(p.elements for p in self.parameters)
        if self.offloaded:
            buffer = Tag("grads", "gradient buffer", (largest,))
            timeline.allocate("on host", self.element * largest, buffer, where="host")
            # The ledger that measures does not know this one either.
            buffer = buffer._replace(category="temporary")
            timeline.allocate("on device", self.element * largest, buffer)
        for number, partition in enumerate(self.groups.partitions):
            key = ("fp32 grad", number)
            timeline.allocate(key, self.stored * partition, rank_part, where=self.where)
        if not self.offloaded:  # made and dropped, to have them once
            for number in range(len(self.groups.partitions)):
                timeline.free(("fp32 grad", number))

    def gradient(self, key: Key, name: str) -> None:
        self._open_bucket()
        if self.whole_in_fp32:
            self._accumulate_in_fp32(key, name)
        else:
            self.accumulate(key, name)
        if self.shards_gradients or (self.overlaps and self.last):
            self._put(self.by_name[name])

    def end_backward(self) -> None:
        if not self.shards_gradients and not self.overlaps and self.last:
            for group in self.groups.groups:
                for p in group:
                    self._put(p)
        if self.shards_gradients or self.last:
            self._reduce()
            self._keep_part()
            if not self.whole_in_fp32:  # those stay, and in them the bucket, until the step
                self._close_window()

    def step(self) -> None:
        timeline, partitions = self.timeline, self.groups.partitions
        largest = max(self.groups.mine.values(), default=0)
        self._transient("gradient norm", FP64 * largest)
        for number, partition in enumerate(partitions):
            if not self.offloaded:
                if not self.in_fp32:
                    flat = Tag("temporary", "flat gradients", (partition,))
                    timeline.allocate("flat", self.element * partition, flat)
                    if self.element != self.stored:
                        timeline.allocate("flat in fp32", FP32 * partition, flat)
                        timeline.free("flat")
                if number == len(partitions) - 1:
                    timeline.free("kept")
            allocate_optimizer(timeline, self.rank, number, partition, where=self.where)
            timeline.free("flat")
            timeline.free("flat in fp32")
            timeline.free(("part", number))
        timeline.free("kept")
        self._close_window()

    def _close_window(self) -> None:
        for p in self.parameters:
            self.timeline.free(("grad", p.name))
        for number in range(2):
            self.timeline.free(("ipg", number))

    def _accumulate_in_fp32(self, key: Key, name: str) -> None:
        p = self.by_name[name]
        if not self.timeline.has(("grad", name)):
            self.timeline.allocate(("grad", name), FP32 * p.elements, tag("grads", p))
        else:
            self._transient("gradient in fp32", FP32 * p.elements)
        self.timeline.free(key)

    def _open_bucket(self) -> None:
        for number in range(2 if self.overlaps else 1):
            if not self.timeline.has(("ipg", number)):
                bucket = Tag("buffers", "reduce bucket", (self.bucket,))
                size_bytes = self.bucket_element * self.bucket
                self.timeline.allocate(("ipg", number), size_bytes, bucket)

    def _put(self, p: Parameter) -> None:
        if self.filled + p.elements > self.bucket:
            self._reduce()
        if p.elements <= self.bucket:
            self.timeline.free(("grad", p.name))  # it lives in the bucket from now on
        self.in_bucket.append(p)
        self.filled += p.elements

    def _reduce(self) -> None:
        if not self.in_bucket:
            return
        mine = [p for p in self.in_bucket if p.name in self.groups.mine]
        if self.in_fp32 and mine:
            self._open_fp32_part()
        if self._slices(mine) > 1:
            flat = Tag("temporary", "flattened bucket", (self.filled,))
            self.timeline.allocate("flattened", self.bucket_element * self.filled, flat)
        if self.whole_in_fp32:  # sent in bf16 all the same
            sent = Tag("temporary", "flattened bucket in bf16", (self.filled,))
            self.timeline.allocate("sent", 2 * self.filled, sent)
        self.timeline.free("flattened")
        if self.in_fp32 and mine:
            self._transient("in fp32", FP32 * max(self.groups.mine[p.name] for p in mine))
        elif mine:
            self._keep_in_partition(mine)
        self.timeline.free("sent")
        for p in self.in_bucket:
            if self.shards_gradients or p in mine:
                self.timeline.free(("grad", p.name))
        self.in_bucket, self.filled = [], 0

    def _slices(self, mine: list[Parameter]) -> int:
        """Pieces that a bucket is reduced in: neighbours that go to one rank are one piece, but
        not those that this rank adds to its fp32 part one by one."""
        owners = {owner for p in self.in_bucket for owner in self._owners(p)}
        apart = len(mine) - 1 if self.in_fp32 and mine else 0
        return len(owners) + apart

    def _owners(self, p: Parameter) -> range:
        first, last = self.groups.owners[p.name]
        return range(first, last + 1)

    def _open_fp32_part(self) -> None:
        for number, partition in enumerate(self.groups.partitions):
            if not self.timeline.has(("part", number)):
                part = Tag("grads", "fp32 gradients of this rank's part", (partition,))
                self.timeline.allocate(("part", number), FP32 * partition, part)

    def _keep_in_partition(self, mine: list[Parameter]) -> None:
        if self.offloaded:
            if self.accumulates_on_host:
                for p in mine:
                    if not self.timeline.has(("on host", p.name)):
                        size_bytes = self.element * p.elements
                        owned = tag("grads", p)
                        self.timeline.allocate(("on host", p.name), size_bytes, owned, where="host")
            if self.element != FP32:
                largest = max(self.groups.mine[p.name] for p in mine)
                self._transient("in fp32", FP32 * largest)
        elif not self.timeline.has("kept now"):
            elements = sum(self.by_name[name].elements for name in self.groups.mine)
            kept = Tag("grads", "gradients of this rank's part", (elements,))
            self.timeline.allocate("kept now", self.element * elements, kept)

    def _keep_part(self) -> None:
        if self.timeline.has("kept"):
            self.timeline.free("kept now")  # added to what the window has
        elif self.timeline.has("kept now"):
            self.timeline.rename("kept now", "kept", "grads")

    def _transient(self, what: str, size_bytes: int) -> None:
        self.timeline.allocate("transient", size_bytes, Tag("temporary", what))
        self.timeline.free("transient")
