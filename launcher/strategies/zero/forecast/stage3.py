"""Allocations of DeepSpeed's stage 3: held, fetched and released.

Follows deepspeed 0.19.8: runtime/zero/stage3.py, partition_parameters.py, and the fetching and
prefetching of partitioned_param_coordinator.py, which decides by the order in which modules ran.
"""

from collections.abc import Iterator

from launcher.forecast.timeline import Timeline
from launcher.forecast.trace.events import Key, Module
from launcher.model.foreign.config import ForeignConfig
from launcher.strategies.ledger import Where
from launcher.strategies.parameters import Parameter
from launcher.strategies.rank import FP32, Rank
from launcher.strategies.zero.config import accumulates_in_fp32
from launcher.strategies.zero.forecast.coordinator import Coordinator
from launcher.strategies.zero.forecast.flat_groups import FP64, ZeroBuffers, optimizer_groups
from launcher.strategies.zero.fraction import kept_on_device

SUB_GROUP_ELEMENTS = 1_000_000_000  # deepspeed's default sub_group_size
NORM_ELEMENTS = 250_000_000  # of a gradient that are in fp64 at once (_constant_buffered_norm2)


class Zero3(ZeroBuffers):
    """Parameters in slices; whole while their module, or one that runs soon, needs them."""

    def __init__(self, rank: Rank, timeline: Timeline) -> None:
        super().__init__(rank, timeline)
        self.grad_element = FP32 if accumulates_in_fp32(rank.resolved.config) else self.element
        most = int(self.config.get("sub_group_size", SUB_GROUP_ELEMENTS))
        sub_groups = self._sub_groups(most)
        self.groups = [sum(map(self._slice, group)) for group in sub_groups]
        self.piece_elements = self.groups
        self.tensors = [len(group) for group in sub_groups]
        fraction = rank.resolved.config.sharding.offload_fraction
        self.kept = kept_on_device(self.groups, fraction) if self.offloaded else frozenset()
        self.kept_names = {p.name for number in self.kept for p in sub_groups[number]}
        self.last = True
        self.coordinator = Coordinator(rank, timeline, self.config)

    def build(self) -> None:
        timeline = self.timeline
        where, pins = self.rank.params_where, self.rank.pins
        for p in self.parameters:
            size_bytes = self.rank.computing_bytes(p) * self._slice(p)
            self._convert_whole(p)
            if p.trained:
                timeline.allocate(("initial", p.name), size_bytes, "params", where=where)
            else:  # the optimizer, which moves the others, does not know it
                key = ("frozen", p.name)
                timeline.allocate(key, size_bytes, "frozen", where=where, pinned=pins)
            if p.packed and isinstance(self.rank.resolved.model, ForeignConfig):
                whole = -(-self.whole_elements[p.name] // self.ranks)  # of a layer to be replaced
                timeline.allocate(("replaced", p.name), self.element * whole, "temporary")
        for p in self.parameters:
            timeline.free(("replaced", p.name))
        for p in self.parameters:  # filled one by one; the value before is still there
            drawn = self.draw(p)
            timeline.free("value")
            timeline.rename(drawn, "value", "temporary")
        timeline.free("value")
        total = sum(self._slice(p) for p in self.trained)
        if self.rank.device_type != "cpu":  # they make room before they come back, end to end
            self._drop_born()
            timeline.empty_cache()
        timeline.allocate("param", self.element * total, "params", where=where, pinned=pins)
        self._drop_born()  # on a CPU they go only now
        self._build_optimizer(total)

    def _convert_whole(self, p: Parameter) -> None:
        """zero.Init makes a parameter in fp32, as torch does, converts it, and keeps a slice."""
        if not p.packed:
            self.timeline.allocate("whole", FP32 * p.elements, "temporary")
            if self.element != FP32:
                self.transient(self.element * p.elements)
            self.timeline.free("whole")

    def _drop_born(self) -> None:
        for p in self.trained:
            self.timeline.free(("initial", p.name))

    def begin_forward(self, *, last: bool) -> None:
        self.last = last
        self.coordinator.begin()

    def module(self, event: Module) -> None:
        if event.entering:
            self.coordinator.fetch(event.name, forward=event.forward)
        else:
            self.coordinator.release(event.name, forward=event.forward)

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
        self.coordinator.drop_persistent()
        self._look_for_overflow()
        largest = max(self._slice(p) for p in self.trained)
        if not self.norms_on_the_way:
            self.transient(FP64 * largest)  # the gradient norm
        for number, elements in enumerate(self.groups):
            if not self.offloaded:
                self._flatten_gradients(number, elements)
            self.update_piece(number, elements)
            self.timeline.free("flat")
            self.timeline.free("converted")
        self.coordinator.hold_persistent()

    def _look_for_overflow(self) -> None:
        """Where losses are scaled, all gradients that lie end to end are held against infinity, by
        their magnitudes (has_overflow)."""
        if self.rank.resolved.config.optim.arithmetic.computed != "fp16":
            return
        where: Where = "host" if self.offloaded else "device"
        lying = (n for number, n in enumerate(self.groups) if number not in self.kept)
        elements, stream = sum(lying), "reduce"
        size_bytes = self.grad_element * elements
        self.timeline.allocate("sizes", size_bytes, "temporary", where=where, stream=stream)
        for each in (elements, 1):  # bools, and whether there is any
            self.transient(each, where=where, stream=stream)
        self.timeline.free("sizes")

    def _flatten_gradients(self, number: int, elements: int) -> None:
        """Gradients of a sub-group end to end, then in the type of the master weights."""
        if self.tensors[number] > 1:  # one alone stays where it lies
            self.timeline.allocate("flat", self.grad_element * elements, "temporary")
        if self.grad_element != self.stored:
            self.timeline.allocate("converted", self.stored * elements, "temporary")
            self.timeline.free("flat")

    def updated(self) -> Iterator[tuple[Parameter, int, int]]:
        for p in self.trained:
            first = min(p.elements, self.rank.rank * self._slice(p))
            yield p, first, min(self._slice(p), p.elements - first)

    def where_updated(self, parameter: Parameter) -> Where:
        return "device" if parameter.name in self.kept_names else self.where

    def where_of(self, number: int) -> Where:
        return "device" if number in self.kept else self.where

    def _build_optimizer(self, total: int) -> None:
        timeline, where, pins = self.timeline, self.where, self.rank.pins
        # Gradients wait for the optimizer in host memory, also where its states are on a disk.
        gradients: Where = "host" if self.offloaded else "device"
        for number, elements in enumerate(self.groups):
            if self.element != self.stored:
                timeline.allocate("converted", FP32 * elements, "temporary", where=where)
            timeline.allocate(("master", number), self.stored * elements, "master", where=where)
            timeline.free("converted")
        if self.rank.device_type != "cpu":
            self._move_kept_masters()
        # `gradient_buffer` of initialize_optimizer_states, as large as the largest sub-group
        timeline.allocate("spare", self.stored * max(self.groups), "temporary", where=gradients)
        if self.offloaded:
            for number, elements in enumerate(self.groups):
                self._allocate_fp32_gradient(number, elements)
        timeline.free("spare")
        timeline.allocate("ipg", self.element * self.bucket, "buffers")
        size_bytes = self.grad_element * total
        timeline.allocate("grads", size_bytes, "grads", where=gradients, pinned=pins)
        self._hang_hooks()
        if self.kept:
            self._place_gradients()

    def _hang_hooks(self) -> None:
        """Each parameter is gathered for a moment, as its gradient's hook needs the whole of it
        (create_reduce_and_remove_grad_hooks)."""
        for p in self.trained:
            self.timeline.allocate("whole", self.element * self.ranks * self._slice(p), "temporary")
            if self.rank.params_where != "device" and self.rank.device_type != "cpu":
                self.transient(self.element * self._slice(p))
            self.timeline.free("whole")

    def _move_kept_masters(self) -> None:
        for number in sorted(self.kept):
            self.timeline.free(("master", number))
            size_bytes = self.stored * self.groups[number]
            self.timeline.allocate(("master", number), size_bytes, "master")

    def _allocate_fp32_gradient(self, number: int, elements: int) -> None:
        """Beside the master weights, or in host memory where those are on a disk."""
        where: Where = "device" if number in self.kept else "host"
        key, pins = ("fp32 grad", number), self.rank.pins
        self.timeline.allocate(key, FP32 * elements, "grads", where=where, pinned=pins)

    def _place_gradients(self) -> None:
        """See `fraction.accumulate_beside_masters`."""
        self.timeline.free("grads")
        on_host = 0
        for number, elements in enumerate(self.groups):
            if number not in self.kept:
                on_host += elements
            elif self.grad_element != FP32:
                key, size_bytes = ("grads", number), self.grad_element * elements
                self.timeline.allocate(key, size_bytes, "grads")
        size_bytes = self.grad_element * on_host
        self.timeline.allocate("grads", size_bytes, "grads", where="host", pinned=self.rank.pins)

    def _reduce(self) -> None:
        if not self.in_bucket:
            return
        slices = sum(self._slice(p) for p in self.in_bucket)
        # reduce_scatter_coalesced sends such a one from where it lies, others from a padded copy
        alone = len(self.in_bucket) == 1 and self.in_bucket[0].elements % self.ranks == 0
        if not alone:
            self.timeline.allocate(
                "sent", self.element * slices * self.ranks, "temporary", stream="reduce"
            )
        if self.rank.device_type == "cpu" and self.ranks > 1:
            # gloo sums in a copy of what is sent (ProcessGroupGloo::_reduce_scatter_base).
            self.transient(self.element * slices * self.ranks)
        if self.grad_element != self.element:
            self.timeline.allocate(
                "added", self.grad_element * slices, "temporary", stream="reduce"
            )
        if self.norms_on_the_way:
            largest = max(self._slice(p) for p in self.in_bucket)
            fetched = (self._slice(p) for p in self.in_bucket if p.name not in self.kept_names)
            size_bytes = self.grad_element * max(fetched, default=0)
            # partition_grads fetches each host gradient, to add to it and take its norm on the GPU
            self.timeline.allocate("fetched", size_bytes, "temporary", stream="reduce")
            if self.last:
                self.transient(FP64 * min(largest, NORM_ELEMENTS), stream="reduce")
            self.timeline.free("fetched")
        self.timeline.free("added")
        self.timeline.free("sent")
        for p in self.in_bucket:
            self.timeline.free(("grad", p.name))
        self.in_bucket, self.filled = [], 0

    def _slice(self, p: Parameter) -> int:
        return -(-p.elements // self.ranks)

    def _sub_groups(self, most: int) -> list[list[Parameter]]:
        """Parameters of each sub-group, which the optimizer updates one by one; one is closed when
        this rank has `most` elements of it."""
        found: list[list[Parameter]] = []
        for group in optimizer_groups(self.rank):
            found.append([])
            elements = 0
            for p in group:
                if elements >= most:
                    found.append([])
                    elements = 0
                found[-1].append(p)
                elements += self._slice(p)
        return found
