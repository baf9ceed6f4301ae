"""The training state of an engine as ranges of flattened tensors, with or without gaps.

Every strategy gives each rank such ranges, so one checkpoint format serves them all: they differ
only in the ranges that a rank holds. Nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeGuard

import torch
from torch import Tensor

from launcher.optim.entry import MOMENTS
from launcher.parallel.places import Places

if TYPE_CHECKING:
    from launcher.optim.low_precision import LowPrecisionAdamW

PARAM = "param"
"""The kind of a shard that holds parameter values; other kinds are named by the optimizer."""
MASK = "mask"
"""The kind of a shard of bytes with a bit for each weight of a parameter: 0 where it is pruned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A range of one flattened tensor of the training state.

    `data` is a contiguous 1-D view of live memory; it is read to save and written to load. Its
    element i is element start + i // run * pitch + i % run of the tensor that the model calls
    `name`: memory is dense, only the places in the whole tensor may have gaps.
    """

    name: str
    kind: str
    start: int
    data: Tensor
    run: int | None = None
    """Elements that follow each other before a gap, a divisor of all; None: all of them do."""
    pitch: int | None = None
    """Elements from the beginning of one run to that of the next; None where `run` is."""

    @classmethod
    def at(cls, places: Places, *, name: str, kind: str, data: Tensor) -> Self:
        """Return the shard whose elements have these places."""
        gaps = {} if places.contiguous else {"run": places.run, "pitch": places.pitch}
        return cls(name=name, kind=kind, start=places.start, data=data, **gaps)

    @property
    def places(self) -> Places:
        """Places of the elements in the full tensor."""
        return Places.of(self.start, self.data.numel(), self.run, self.pitch)

    @property
    def stop(self) -> int:
        """One past the last element's place in the whole tensor."""
        return self.places.stop


OwnShapes = Mapping[str, Mapping[str, tuple[int, ...]]]
"""kind -> the parameters that have it -> full shape. Adafactor's factors of a matrix [n, m] are
[n, 1] and [1, m], and a vector has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdatedRange:
    """Elements [start, start + numel) of the flattened parameter `name`, which are those from
    `offset` on of the (local, flattened) `tensor` that an optimizer updates."""

    name: str
    start: int
    numel: int
    tensor: Tensor
    offset: int = 0


Updated = tuple[torch.optim.Optimizer, Sequence[UpdatedRange]]
"""A rank's optimizer and what it updates: master weights, of which the parameters that compute are
copies, or the parameters themselves."""


class TrainingState(Protocol):
    """An engine's state for a checkpoint. Built between two steps, used at once."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Full shape of every parameter that is trained; tied parameters once."""

    @property
    def kinds(self) -> Sequence[str]:
        """`PARAM` and the optimizer's: `exp_avg`, `exp_avg_sq`."""

    @property
    def own_shapes(self) -> OwnShapes:
        """Kinds that some parameters lack, or hold in another shape."""

    def saved(self) -> Iterator[Shard]:
        """Yield what this rank writes; all ranks write every element of every kind once."""

    def loaded(self) -> Iterator[Shard]:
        """Yield the ranges that this rank fills to restore its part of the state."""

    def frozen(self) -> Iterator[Shard]:
        """Yield this rank's part of the weights that are not trained, to be filled: no checkpoint
        has them."""

    def updated(self) -> Updated:
        """Return the ranges of parameters that this rank's optimizer updates."""

    def counters(self) -> dict[str, float]:
        """Return the optimizer's own step counters, the same for every parameter."""

    def finish_load(self, counters: Mapping[str, float]) -> None:
        """Set the counters, and derive what depends on the filled ranges."""


def create_states(
    optimizer: torch.optim.Optimizer,
    tensors_of_groups: Sequence[tuple[dict[str, Any], Sequence[Tensor]]],
) -> None:
    """Make the states that torch's optimizers create in their first step; nothing else changes.

    A step with zero gradients at learning rate 0 moves no parameter. One tensor at a time, so
    that one gradient's memory is enough. Counters stay at 0, as in an optimizer that never ran.
    """
    # Adam and SGD add weight decay to the gradient: moments would begin with weights that may be
    # replaced. A step that was skipped leaves `found_inf`, with which no state would be made.
    still = {"params": [], "lr": 0.0, "weight_decay": 0.0}
    kept = [dict(group) for group in optimizer.param_groups]
    found_inf = optimizer.__dict__.pop("found_inf", None)
    for group in optimizer.param_groups:
        group.update(still)
    try:
        for group, tensors in tensors_of_groups:
            for tensor in tensors:
                if optimizer.state.get(tensor):  # a look-up would make an entry
                    continue
                group["params"], gradient = [tensor], tensor.grad
                tensor.grad = torch.zeros_like(tensor)
                optimizer.step()
                tensor.grad = gradient
                set_counters(optimizer.state[tensor], dict.fromkeys(counters(optimizer, tensor), 0))
            group["params"] = []
    finally:
        for group, before in zip(optimizer.param_groups, kept, strict=True):
            group.update(before)
        if found_inf is not None:
            optimizer.__dict__["found_inf"] = found_inf


def reads_in_pieces(optimizer: torch.optim.Optimizer) -> TypeGuard[LowPrecisionAdamW]:
    """Return whether an optimizer stores its values in another form than a checkpoint does."""
    return hasattr(optimizer, "pieces")


def state_kinds(optimizer: torch.optim.Optimizer, tensor: Tensor) -> list[str]:
    """Return the names of one parameter's states that a checkpoint holds."""
    if reads_in_pieces(optimizer):
        return list(MOMENTS)
    state = optimizer.state[tensor]
    return [k for k, v in state.items() if isinstance(v, Tensor) and v.dim() > 0]


def counters(optimizer: torch.optim.Optimizer, tensor: Tensor) -> dict[str, float]:
    """Return the scalar states of one parameter."""
    state = optimizer.state[tensor]
    return {
        name: float(value)
        for name, value in state.items()
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)
    }


def state_of(optimizer: torch.optim.Optimizer, tensor: Tensor, kind: str) -> Tensor:
    """Return a kind of state of `tensor`, or `tensor` itself for `PARAM`."""
    state: Tensor = tensor if kind == PARAM else optimizer.state[tensor][kind]
    return state


def set_counters(state: dict[str, Any], values: Mapping[str, float]) -> None:
    """Write scalar states in place, keeping their types, where a parameter has them."""
    for name, value in values.items():
        if name not in state:
            continue
        if isinstance(state[name], Tensor):
            state[name].fill_(value)
        else:
            state[name] = type(state[name])(value)
