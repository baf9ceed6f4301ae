"""Allocations of DeepSpeed's stages 0 to 2, as engine.py sets them up.

Sizes and order follow deepspeed 0.19.8: runtime/engine.py, runtime/bf16_optimizer.py and
runtime/zero/stage_1_and_2.py.
"""

import itertools
from collections.abc import Iterable, Iterator

from launcher.forecast.buffers import Whole
from launcher.forecast.timeline import Timeline
from launcher.forecast.trace.events import Key
from launcher.strategies.parameters import Parameter
from launcher.strategies.rank import FP32, Rank
from launcher.strategies.zero.config import accumulates_in_fp32
from launcher.strategies.zero.forecast.flat_groups import FP64, FlatBuffers, messages

ALLREDUCE_ELEMENTS = 500_000_000  # the engine's own bucket, at stage 0 and in BF16_Optimizer


class Zero0(Whole):
    """Gradients are flattened, summed over the ranks and copied back."""

    def end_backward(self) -> None:
        if self.last:
            for tensors in allreduce_buckets(p.elements for p in self.trained):
                if len(tensors) > 1:  # one alone is summed where it lies
                    self.transient(FP32 * sum(tensors))


class Bf16Stage1(FlatBuffers):
    """deepspeed's BF16_Optimizer: whole fp32 gradients beside whole bf16 ones."""

    def build_group(self, number: int) -> None:
        super().build_group(number)
        elements = self.ranks * self.partitions[number]
        self.timeline.allocate(("fp32 gradients", number), FP32 * elements, "grads")

    def end_backward(self) -> None:
        largest = max(p.elements for p in self.trained)
        self.transient(FP32 * largest)  # a gradient in fp32
        if self.last:
            # One tensor per group, with the gradients of all ranks' parts.
            ranks, partitions = self.ranks, self.partitions
            for tensors in allreduce_buckets(ranks * partition for partition in partitions):
                if len(tensors) > 1:
                    self.timeline.allocate("flat", FP32 * sum(tensors), "temporary")
                self.transient(2 * sum(tensors))  # sent in bf16
                self.timeline.free("flat")

    def step(self) -> None:
        for number, partition in enumerate(self.partitions):
            self.update_piece(number, partition)
        self.drop_gradients()


class Zero12(FlatBuffers):
    """Stages 1 and 2: gradients pass through a bucket, and each rank keeps those of its part."""

    def __init__(self, rank: Rank, timeline: Timeline) -> None:
        super().__init__(rank, timeline)
        resolved = rank.resolved
        self.shards_gradients = self.config["stage"] == 2
        self.overlaps = bool(self.config["overlap_comm"])
        self.stream = "reduce" if self.overlaps else None
        # bf16 gradients are added up in an fp32 copy of this rank's part.
        self.in_fp32 = accumulates_in_fp32(resolved.config)
        # Stage 1 has no parts of its own for that: it adds up whole gradients in fp32.
        self.whole_in_fp32 = self.in_fp32 and not self.shards_gradients
        self.bucket_element = FP32 if self.whole_in_fp32 else self.element
        self.accumulates_on_host = resolved.accumulation > 1 and self.shards_gradients
        # Its part is the end of the model, whose gradients are there before activations have gone:
        # it allocates more, or finds less that is free to put its part into.
        keeps_part = self.offloaded or not self.whole_in_fp32
        self.last_may_need_more = keeps_part and rank.world_size > 1

    def lays_on_host(self, size_bytes: int) -> bool:
        """Return whether the unallocated memory of a GPU is too little; the context is not counted
        (flatten_on_accelerator in stage_1_and_2.py)."""
        memory_bytes = self.rank.memory_bytes
        if memory_bytes is None or self.rank.device_type == "cpu":
            return False
        return memory_bytes - self.timeline.current_bytes < size_bytes

    def build_group(self, number: int) -> None:
        self.timeline.empty_cache()
        super().build_group(number)

    def build(self) -> None:
        super().build()
        timeline = self.timeline
        if self.offloaded:
            largest = max(p.elements for p in self.trained)
            size_bytes = self.element * largest
            # temp_grad_buffer_for_cpu_offload and temp_grad_buffer_for_gpu_offload
            timeline.allocate("on host", size_bytes, "grads", where="host", pinned=self.rank.pins)
            timeline.allocate("on device", size_bytes, "grads")
        for number, partition in enumerate(self.partitions):
            key, size_bytes = ("fp32 grad", number), self.stored * partition
            timeline.allocate(key, size_bytes, "grads", where=self.where, pinned=self.rank.pins)
        if not self.offloaded:  # made and dropped, to have them once
            for number in range(len(self.partitions)):
                timeline.free(("fp32 grad", number))

    def accumulate(self, key: Key, name: str) -> None:
        super().accumulate(key, name)
        # Where no window adds to it, it only passes through: the reduced one is the gradient.
        if self.shards_gradients or self.rank.resolved.accumulation == 1:
            self.timeline.rename(("grad", name), ("grad", name), "temporary")

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
            for p in itertools.chain(*self.groups):
                self._put(p)
        if self.shards_gradients or self.last:
            self._reduce()
            self._keep_part()
            if not self.whole_in_fp32:  # those stay, and in them the bucket, until the step
                self._close_window()

    def step(self) -> None:
        timeline, partitions = self.timeline, self.partitions
        largest = max(self.mine.values(), default=0)
        if not self.norms_on_the_way:
            self.transient(FP64 * largest)  # the gradient norm
        for number, partition in enumerate(partitions):
            if not self.offloaded:
                if not self.in_fp32:
                    timeline.allocate("flat", self.element * partition, "temporary")
                    if self.element != self.stored:
                        timeline.allocate("flat in fp32", FP32 * partition, "temporary")
                        timeline.free("flat")
                if number == len(partitions) - 1:  # it has the gradients of all groups
                    timeline.free("kept")
            self.update_piece(number, partition)
            timeline.free("flat")
            timeline.free("flat in fp32")
            timeline.free(("part", number))
        timeline.free("kept")
        self._close_window()

    def _close_window(self) -> None:
        for p in self.trained:
            self.timeline.free(("grad", p.name))
        for number in range(2):
            self.timeline.free(("ipg", number))

    def _accumulate_in_fp32(self, key: Key, name: str) -> None:
        p = self.by_name[name]
        if not self.timeline.has(("grad", name)):
            self.timeline.allocate(("grad", name), FP32 * p.elements, "grads")
        else:
            self.transient(FP32 * p.elements)
        self.timeline.free(key)

    def _open_bucket(self) -> None:
        # overlap_comm: one bucket is filled while the other one is reduced
        for number in range(2 if self.overlaps else 1):
            if not self.timeline.has(("ipg", number)):
                size_bytes = self.bucket_element * self.bucket
                # Given back when the backward is over, unless whole gradients lie in them.
                category = "buffers" if self.whole_in_fp32 else "temporary"
                self.timeline.allocate(("ipg", number), size_bytes, category)

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
        mine = [p for p in self.in_bucket if p.name in self.mine]
        if self.in_fp32 and mine:
            self._open_fp32_part()
        slices = self._slices()
        owners = (owner for owner, _ in slices)
        for message in messages((elements for _, elements in slices), self.bucket):
            if len(message) > 1:  # one alone is sent from where it lies
                size_bytes = self.bucket_element * sum(message)
                self.timeline.allocate("flattened", size_bytes, "temporary", stream=self.stream)
            if self.whole_in_fp32:  # sent in bf16 all the same
                self.timeline.allocate("sent", 2 * sum(message), "temporary", stream=self.stream)
                self.timeline.free("flattened")
            for elements, owner in zip(message, owners, strict=False):
                if self.in_fp32 and owner == self.rank.rank:  # to add it to its part
                    self.transient(FP32 * elements, stream=self.stream)
            self.timeline.free("flattened")
            self.timeline.free("sent")
        if self.norms_on_the_way and mine and self.last:
            largest = max(self.mine[p.name] for p in mine)
            self.transient(FP64 * largest, stream=self.stream)
        if mine and not self.in_fp32:
            self._keep_in_partition(mine)
        # Those added to the fp32 part stay on the module until its backward is over.
        stay = mine if self.in_fp32 and self.shards_gradients and not self.offloaded else []
        for p in self.in_bucket:
            if (self.shards_gradients or p in mine) and p not in stay:
                self.timeline.free(("grad", p.name))
        self.in_bucket, self.filled = [], 0

    def _slices(self) -> list[tuple[int, int]]:
        """(rank, elements) of the pieces that a bucket is reduced in: adjacent ones that go to
        one rank are one piece, but not those that this rank adds to its fp32 part one by one."""
        slices: list[tuple[int, int]] = []
        before = -1
        for p in self.in_bucket:
            for owner, elements in self.owners[p.name].items():
                if owner == before and not (self.in_fp32 and owner == self.rank.rank):
                    elements += slices.pop()[1]
                slices.append((owner, elements))
                before = owner
        return slices

    def _open_fp32_part(self) -> None:
        for number, partition in enumerate(self.partitions):
            if not self.timeline.has(("part", number)):
                key, size_bytes = ("part", number), FP32 * partition
                self.timeline.allocate(key, size_bytes, "grads", stream=self.stream)

    def _keep_in_partition(self, mine: list[Parameter]) -> None:
        if self.offloaded:
            if self.accumulates_on_host:
                for p in mine:
                    key, size_bytes = ("on host", p.name), self.element * p.elements
                    if not self.timeline.has(key):
                        self.timeline.allocate(
                            key, size_bytes, "grads", where="host", pinned=self.rank.pins
                        )
            if self.element != FP32:
                largest = max(self.mine[p.name] for p in mine)
                self.transient(FP32 * largest, stream=self.stream)
        elif not self.timeline.has("kept now"):
            # whole gradients, those that are cut at the edges of the partition included
            elements = sum(self.by_name[name].elements for name in self.mine)
            size_bytes = self.element * elements
            self.timeline.allocate("kept now", size_bytes, "grads", stream=self.stream)

    def _keep_part(self) -> None:
        if self.timeline.has("kept"):
            self.timeline.free("kept now")  # added to what the window has
        elif self.timeline.has("kept now"):
            self.timeline.rename("kept now", "kept", "grads")


def allreduce_buckets(sizes: Iterable[int]) -> Iterator[list[int]]:
    """Yield the tensors, in elements, that the engine's `allreduce_no_retain` flattens together: a
    bucket ends behind the tensor with which it is larger than that, however large that one is."""
    bucket: list[int] = []
    for elements in sizes:
        bucket.append(elements)
        if sum(bucket) > ALLREDUCE_ELEMENTS:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
