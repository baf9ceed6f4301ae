"""Buffers that strategies allocate around the model: one class each, which follows the events."""

import math
from collections.abc import Hashable, Iterator, Mapping
from functools import cached_property

from launcher.forecast.timeline import Timeline
from launcher.forecast.trace.events import Key, Module, Place
from launcher.model.foreign.config import ForeignConfig
from launcher.model.linears import QUANTIZED_ELEMENTS, QUANTIZING_BYTES, inner_of, is_adapter
from launcher.model.parts import block_of, is_projection
from launcher.optim.entry import OptimizerCosts
from launcher.strategies.ledger import Where
from launcher.strategies.masks import CHUNK_ELEMENTS, UNPACKED_BYTES, bytes_of
from launcher.strategies.parameters import Parameter, shards_of
from launcher.strategies.rank import FP32, Rank


class Buffers:
    """A strategy's own allocations, on a timeline that the model's are written to as well; where it
    does not say otherwise, nothing happens."""

    def __init__(self, rank: Rank, timeline: Timeline) -> None:
        self.rank = rank
        self.timeline = timeline
        self.parameters, self.trained = rank.parameters, rank.trained
        self.by_name = {parameter.name: parameter for parameter in self.parameters}
        self.element, self.stored = rank.computed_bytes, rank.stored_bytes
        self._costs: dict[str, OptimizerCosts] = {}
        self.updates_on: str | None = None
        """Stream of the optimizer's kernels, where it is not the one that computes."""
        self.cublas_workspace_bytes = 0
        """Workspace that cuBLAS keeps for that stream from its first product there on."""
        self.last_may_need_more = False
        """The last rank of a group may have a higher peak than the first."""

    def build(self) -> None:
        """The engine is built."""

    def begin_forward(self, *, last: bool) -> None:
        """A micro-batch starts; `last` closes the accumulation window."""

    def enter(self, place: Place) -> None:
        """A segment is about to run, forwards or backwards."""

    def leave(self, place: Place) -> None:
        """A segment is over."""

    def end_forward(self) -> None:
        """The loss is there."""

    def gradient(self, key: Key, name: str) -> None:
        """Autograd hands over a parameter's gradient, in the storage `key`."""

    def module(self, event: Module) -> None:
        """A module is entered or left."""

    def end_backward(self) -> None:
        """The micro-batch's backward is over."""

    def step(self) -> None:
        """Clip, update, drop the gradients."""

    def updated(self) -> Iterator[tuple[Parameter, int, int]]:
        """(parameter, first, number) of the elements that this rank's optimizer updates."""
        return ((p, 0, p.elements) for p in self.trained)

    def where_updated(self, parameter: Parameter) -> Where:
        """Return where these elements are updated."""
        return self.rank.params_where

    def draw(self, p: Parameter) -> Hashable:
        """Allocate a parameter's initial value as `BuildInputs.initial_value` makes it; return its
        key. Transformers' blocks are drawn as a whole, and what is not asked for yet waits."""
        key, timeline, config = ("drawn", p.name), self.timeline, self.rank.resolved.config
        if config.model.init_from is not None and not is_adapter(p.name):  # zeros, to be filled
            # elements of a packed weight are its bytes
            timeline.allocate(key, (1 if p.packed else FP32) * p.elements, "temporary")
            return key
        whole, elements = ("drawn whole", p.name), self.whole_elements[p.name]
        if not timeline.has(whole):
            for name in self._drawn_with(p):
                size_bytes = FP32 * self.whole_elements[name]
                timeline.allocate(("drawn whole", name), size_bytes, "temporary")
        if p.packed:
            self.transient(QUANTIZING_BYTES * min(elements, QUANTIZED_ELEMENTS))
        if p.packed or elements != p.elements:
            size_bytes = (1 if p.packed else FP32) * p.elements
            timeline.allocate(key, size_bytes, "temporary")
            timeline.free(whole)
        else:
            timeline.rename(whole, key, "temporary")
        return key

    def _drawn_with(self, p: Parameter) -> list[str]:
        """Names of parameters that are drawn when the first of them is."""
        block = block_of(p.name)
        foreign = isinstance(self.rank.resolved.model, ForeignConfig)
        if not foreign or block is None or is_adapter(p.name):
            return [p.name]
        return [n for n in self.by_name if block_of(n) == block and not is_adapter(n)]

    @cached_property
    def whole_elements(self) -> Mapping[str, int]:
        """Name -> elements of the whole parameter, or of the weight that is quantised."""
        model, found = self.rank.resolved.model, {}
        for name, shard in shards_of(model, self.rank.model_parallel).items():
            *rows, inner = shard.full_shape or (1,)
            if self.by_name[name].packed:
                inner = inner_of(inner, model.quantize_base)
            found[name] = math.prod(rows) * inner
        return found

    def build_masked(self) -> None:
        """The optimizer's states, which are there before a first step that begins with weights, and
        masks of them: bits in bytes that a piece has to itself or shares."""
        self.build_states()
        for p, first, count in self.updated():
            if is_projection(p.name):
                size_bytes, where = bytes_of(first, count), self.where_updated(p)
                self.timeline.allocate(("mask", p.name), size_bytes, "masks", where=where)

    def build_states(self) -> None:
        """All states of the optimizer."""
        for p in self.trained:
            costs = self.rank.optimizer_costs(self.local_shape(p), p.name)
            self.hold_states(("optimizer", p.name), costs, self.rank.params_where)

    def local_shape(self, parameter: Parameter) -> tuple[int, ...]:
        """Return the shape of what this rank's optimizer updates as one parameter."""
        return parameter.shape

    def hold_masks(self, elements: int, where: Where) -> None:
        """The optimizer has updated so many elements of a weight: its bits are unpacked, a piece at
        a time."""
        if self.rank.resolved.model.masks:
            self.transient(UNPACKED_BYTES * min(elements, CHUNK_ELEMENTS), where=where)

    def transient(
        self, size_bytes: int, *, where: Where = "device", stream: str | None = None
    ) -> None:
        """Allocate and free at once."""
        self.timeline.allocate("transient", size_bytes, "temporary", where=where, stream=stream)
        self.timeline.free("transient")

    def clip_and_update(self) -> None:
        """torch's clip_grad_norm_, which takes one scalar per tensor, and the optimizer."""
        # norms, and their stack
        self.transient(2 * FP32 * len(self.trained), where=self.rank.params_where)
        for parameter in self.trained:
            self.update(parameter)

    def update(self, parameter: Parameter) -> None:
        """The optimizer on one tensor; the first step allocates its states."""
        key, where = ("optimizer", parameter.name), self.rank.params_where
        costs, stream = self._costs_of(parameter), self.updates_on
        self.hold_states(key, costs, where)
        multiplies = costs.update_flops or costs.update_fp32_flops
        if stream is not None and multiplies and not self.timeline.has("cublas"):
            self.timeline.allocate(
                "cublas", self.cublas_workspace_bytes, "temporary", stream=stream
            )
        self.transient(costs.temporary_bytes, where=where, stream=stream)
        if is_projection(parameter.name):
            self.hold_masks(math.prod(self.local_shape(parameter)), where)

    def _costs_of(self, parameter: Parameter) -> OptimizerCosts:
        if parameter.name not in self._costs:
            shape = self.local_shape(parameter)
            self._costs[parameter.name] = self.rank.optimizer_costs(shape, parameter.name)
        return self._costs[parameter.name]

    def hold_states(self, key: Hashable, costs: OptimizerCosts, where: Where) -> None:
        """An optimizer's states of `key`, each in a storage of its own, unless it has them."""
        for number, size_bytes in enumerate(costs.states_bytes):
            if not self.timeline.has((key, number)):
                self.timeline.allocate(
                    (key, number), size_bytes, "optimizer", where=where, stream=self.updates_on
                )


class Whole(Buffers):
    """One process: parameters, gradients and optimizer states as they come."""

    def __init__(self, rank: Rank, timeline: Timeline) -> None:
        super().__init__(rank, timeline)
        self.last = True

    def build(self) -> None:
        self.materialize("param", self.stored)

    def materialize(self, kind: str, element: int) -> None:
        """Parameters are drawn in fp32, one by one, and converted to `element` bytes each; frozen
        ones to the type that is computed in."""
        for p in self.parameters:
            own = element if p.trained else self.rank.computing_bytes(p)
            drawn = self.draw(p)
            if own == FP32 or p.packed:
                self.timeline.rename(drawn, (kind, p.name), p.category)
            else:
                self.timeline.allocate((kind, p.name), own * p.elements, p.category)
                self.timeline.free(drawn)

    def begin_forward(self, *, last: bool) -> None:
        self.last = last

    def gradient(self, key: Key, name: str) -> None:
        self.accumulate(key, name)

    def accumulate(self, key: Key, name: str) -> None:
        """The first gradient is kept as it is, later ones are added to it."""
        if self.timeline.has(("grad", name)):
            self.timeline.free(key)
        else:
            self.timeline.rename(key, ("grad", name), "grads")
        if self.rank.updates_in_backward:
            self.update(self.by_name[name])
            self.timeline.free(("grad", name))

    def step(self) -> None:
        if not self.rank.updates_in_backward:
            self.clip_and_update()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for p in self.trained:
            self.timeline.free(("grad", p.name))
