"""What DeepSpeed's stage 3 holds, fetches and releases.

Follows deepspeed 0.19.8: runtime/zero/stage3.py, partition_parameters.py, and the fetching and
prefetching of partitioned_param_coordinator.py, which decides by the order in which modules ran.
"""

from launcher.memory.parameters import Parameter
from launcher.memory.timeline import Tag, Timeline, Where
from launcher.memory.trace_events import Key, Module, Place
from launcher.strategies.buffers import tag
from launcher.strategies.rank import FP32, Rank
from launcher.strategies.zero.config import build_config
from launcher.strategies.zero.coordinator import Coordinator

FP64 = 8
SUB_GROUP_ELEMENTS = 1_000_000_000  # deepspeed's default sub_group_size


class Zero3:
    """Parameters in slices; whole while their module, or one that runs soon, needs them."""

    def __init__(self, rank: Rank, timeline: Timeline) -> None:
        resolved = rank.resolved
        config = build_config(
            resolved.config,
            resolved.model,
            accumulation=resolved.accumulation,
            world_size=rank.world_size,
        )["zero_optimization"]
        self.rank = rank
        self.timeline = timeline
        self.ranks = rank.world_size
        self.by_name = {p.name: p for p in rank.parameters}
        self.element = 2 if rank.low else FP32
        self.stored = rank.stored_bytes
        self.grad_element = FP32 if rank.accumulates_in_fp32 else self.element
        self.where = rank.optimizer_where
        self.offloads_optimizer = self.where != "device"
        self.bucket = int(config["reduce_bucket_size"])
        self.groups = self._sub_groups(int(config.get("sub_group_size", SUB_GROUP_ELEMENTS)))
        persistent = int(config["stage3_param_persistence_threshold"])
        self.coordinator = Coordinator(
            timeline,
            rank.parameters,
            tied=resolved.model.tied,
            ranks=self.ranks,
            element=self.element,
            persistent={p.name for p in rank.parameters if p.elements <= persistent},
            prefetch_elements=int(config["stage3_prefetch_bucket_size"]),
            live_elements=int(config["stage3_max_live_parameters"]),
            reuse_elements=int(config["stage3_max_reuse_distance"]),
        )
        self.in_bucket: list[Parameter] = []
        self.filled = 0

    def build(self) -> None:
        timeline = self.timeline
        largest = max(p.elements for p in self.rank.parameters)
        for p in self.rank.parameters:
            slice_bytes = self.element * self._slice(p)
            timeline.allocate(("born", p.name), slice_bytes, tag("params", p))
        timeline.allocate("value", FP32 * largest, Tag("temporary", "initial value"))
        timeline.free("value")
        total = sum(self._slice(p) for p in self.rank.parameters)
        flat = Tag("params", "flat parameter slices", (total,))
        timeline.allocate("param", self.element * total, flat, where=self.rank.params_where)
        for p in self.rank.parameters:
            timeline.free(("born", p.name))
        self._build_optimizer(total)

    def begin_forward(self, *, last: bool) -> None:
        self.coordinator.begin()

    def enter(self, place: Place) -> None:
        pass

    def leave(self, place: Place) -> None:
        pass

    def end_forward(self) -> None:
        pass

    def module(self, event: Module) -> None:
        if event.entering:
            self.coordinator.fetch(event.name)
        else:
            self.coordinator.release(event.name)

    def gradient(self, key: Key, name: str) -> None:
        p = self.by_name[name]
        if self.filled and self.filled + p.elements > self.bucket:
            self._reduce()
        if self.filled + p.elements <= self.bucket:
            self.timeline.free(key)  # it lives in the bucket from now on
        else:
            self.timeline.rename(key, ("grad", name), "temporary")
        self.in_bucket.append(p)
        self.filled += p.elements

    def end_backward(self) -> None:
        self._reduce()
        self.coordinator.release_all()

    def step(self) -> None:
        largest = max(self._slice(p) for p in self.rank.parameters)
        self._transient("gradient norm", FP64 * largest)
        for number, elements in enumerate(self.groups):
            if not self.offloads_optimizer:
                flat = Tag("temporary", "flat gradients", (elements,), "float32")
                self.timeline.allocate("flat", self.stored * elements, flat)
            key = ("optimizer", number)
            if not self.timeline.has(key):
                states = Tag("optimizer", f"optimizer states {number}", (elements,))
                size_bytes = self.rank.optimizer_bytes((elements,))
                self.timeline.allocate(key, size_bytes, states, where=self.where)
            temporary = Tag("temporary", f"update of sub-group {number}", (elements,))
            size_bytes = self.rank.update_bytes((elements,))
            self.timeline.allocate("update", size_bytes, temporary, where=self.where)
            self.timeline.free("update")
            self.timeline.free("flat")
        self.coordinator.hold_persistent()

    def _build_optimizer(self, total: int) -> None:
        timeline, where = self.timeline, self.where
        # Gradients wait for the optimizer in host memory, also where its states are on a disk.
        gradients: Where = "host" if self.offloads_optimizer else "device"
        for number, elements in enumerate(self.groups):
            master = Tag("master", f"master weights {number}", (elements,), "float32")
            if self.element != self.stored:
                converted = master._replace(category="temporary")
                timeline.allocate("converted", FP32 * elements, converted, where=where)
            timeline.allocate(("master", number), self.stored * elements, master, where=where)
            timeline.free("converted")
        spare = Tag("temporary", "spare gradients", (max(self.groups),), "float32")
        timeline.allocate("spare", self.stored * max(self.groups), spare, where=gradients)
        if self.offloads_optimizer:
            for number, elements in enumerate(self.groups):
                grads = Tag("grads", f"fp32 gradients {number}", (elements,), "float32")
                timeline.allocate(("fp32 grad", number), FP32 * elements, grads, where="host")
        timeline.free("spare")
        bucket = Tag("buffers", "reduce bucket", (self.bucket,))
        timeline.allocate("ipg", self.element * self.bucket, bucket)
        grads = Tag("grads", "gradient slices", (total,))
        timeline.allocate("grads", self.grad_element * total, grads, where=gradients)

    def _reduce(self) -> None:
        if not self.in_bucket:
            return
        slices = sum(self._slice(p) for p in self.in_bucket)
        alone = len(self.in_bucket) == 1 and self.in_bucket[0].elements % self.ranks == 0
        if not alone:
            sent = Tag("temporary", "interleaved gradients", (slices * self.ranks,))
            self.timeline.allocate("sent", self.element * slices * self.ranks, sent)
        if self.grad_element != self.element:
            self._transient("gradient slices in fp32", self.grad_element * slices)
        self.timeline.free("sent")
        for p in self.in_bucket:
            self.timeline.free(("grad", p.name))
        self.in_bucket, self.filled = [], 0

    def _slice(self, p: Parameter) -> int:
        return -(-p.elements // self.ranks)

    def _sub_groups(self, most: int) -> list[int]:
        """Elements of this rank in each sub-group, which the optimizer updates one by one."""
        sizes: list[int] = []
        matrices = [p for p in self.rank.parameters if len(p.shape) >= 2]
        vectors = [p for p in self.rank.parameters if len(p.shape) < 2]
        for group in (matrices, vectors):
            size = 0
            for p in group:
                size += self._slice(p)
                if size >= most:
                    sizes.append(size)
                    size = 0
            sizes += [size] if size else []
        return sizes

    def _transient(self, what: str, size_bytes: int) -> None:
        self.timeline.allocate("transient", size_bytes, Tag("temporary", what))
        self.timeline.free("transient")
