"""What strategies allocate around the model: one class each, told what happens and when."""

from typing import Protocol

from launcher.memory.parameters import Parameter
from launcher.memory.timeline import Tag, Timeline, Where
from launcher.memory.trace_events import Key, Module, Place
from launcher.strategies.rank import FP32, Rank


class Buffers(Protocol):
    """A strategy's own allocations, on a timeline that the model's are written to as well."""

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


class Whole:
    """One process: parameters, gradients and optimizer states as they come."""

    def __init__(self, rank: Rank, timeline: Timeline) -> None:
        self.rank = rank
        self.timeline = timeline
        self.parameters = rank.parameters
        self.by_name = {parameter.name: parameter for parameter in self.parameters}
        self.last = True

    def build(self) -> None:
        for p in self.parameters:
            size_bytes = self.rank.stored_bytes * p.elements
            self.timeline.allocate(("param", p.name), size_bytes, tag("params", p))

    def begin_forward(self, *, last: bool) -> None:
        self.last = last

    def enter(self, place: Place) -> None:
        pass

    def leave(self, place: Place) -> None:
        pass

    def end_forward(self) -> None:
        pass

    def gradient(self, key: Key, name: str) -> None:
        self.accumulate(key, name)

    def accumulate(self, key: Key, name: str) -> None:
        """The first gradient is kept as it is, later ones are added to it."""
        if self.timeline.has(("grad", name)):
            self.timeline.free(key)
        else:
            self.timeline.rename(key, ("grad", name), "grads")
        if self.rank.updates_in_backward:
            parameter = self.by_name[name]
            update(self.timeline, self.rank, parameter, parameter.shape)
            self.timeline.free(("grad", name))

    def module(self, event: Module) -> None:
        pass

    def end_backward(self) -> None:
        pass

    def step(self) -> None:
        if not self.rank.updates_in_backward:
            clip_and_update(self.timeline, self.rank, [(p, p.shape) for p in self.parameters])
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for p in self.parameters:
            self.timeline.free(("grad", p.name))


def clip_and_update(
    timeline: Timeline,
    rank: Rank,
    shards: list[tuple[Parameter, tuple[int, ...]]],
    *,
    where: Where = "device",
) -> None:
    """torch's clip_grad_norm_, which takes one scalar per tensor, and the optimizer over
    (parameter, its local shape)."""
    norms = Tag("temporary", "gradient norms", (len(shards),), "float32")
    timeline.allocate("norms", 2 * FP32 * len(shards), norms, where=where)
    timeline.free("norms")
    for parameter, shape in shards:
        update(timeline, rank, parameter, shape, where=where)


def update(
    timeline: Timeline,
    rank: Rank,
    parameter: Parameter,
    shape: tuple[int, ...],
    *,
    where: Where = "device",
) -> None:
    """The optimizer on one tensor; its states are born at the first step."""
    key = ("optimizer", parameter.name)
    if not timeline.has(key):
        size_bytes = rank.optimizer_bytes(shape, parameter.name)
        timeline.allocate(key, size_bytes, tag("optimizer", parameter), where=where)
    temporary = rank.update_bytes(shape, parameter.name)
    timeline.allocate("update", temporary, tag("temporary", parameter), where=where)
    timeline.free("update")


def tag(category: str, parameter: Parameter) -> Tag:
    """A tag that names a parameter."""
    return Tag(category, parameter.name, parameter.shape, "")
