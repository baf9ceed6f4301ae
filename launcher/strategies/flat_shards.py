"""The training state of an engine as pieces of flattened tensors: ranges, or runs with gaps.

Every way of sharding used here gives each rank such pieces, so one checkpoint serves them all:
what differs is only which pieces a rank holds. Nothing is gathered.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from launcher.optim.dtensor import is_dtensor
from launcher.optim.low_precision import MOMENTS, LowPrecisionAdamW
from launcher.strategies.places import Places
from launcher.strategies.updates import Piece, Updated
from launcher.util.sizes import even_part

PARAM = "param"
"""The kind of a shard that holds parameter values; other kinds are named by the optimizer."""
MASK = "mask"
"""That of a shard of bytes which say, a bit each, what of a parameter is not pruned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A piece of one flattened tensor of the training state.

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

    @property
    def places(self) -> Places:
        """Where the elements lie in the whole tensor."""
        return Places.of(self.start, self.data.numel(), self.run, self.pitch)

    @property
    def stop(self) -> int:
        """One past the last element's place in the whole tensor."""
        return self.places.stop


OwnShapes = Mapping[str, Mapping[str, tuple[int, ...]]]
"""kind -> the parameters that have it -> full shape. Adafactor's factors of a matrix [n, m] are
[n, 1] and [1, m], and a vector has none."""


class TrainingState(Protocol):
    """What a checkpoint needs from an engine. Built between two steps, used at once."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Full shape of every parameter that is trained; tied parameters once."""

    @property
    def kinds(self) -> Sequence[str]:
        """`PARAM` and the optimizer's: `exp_avg`, `exp_avg_sq`."""

    @property
    def own_shapes(self) -> "OwnShapes":
        """Where a kind is not there for every parameter in the parameter's shape."""

    def saved(self) -> Iterator[Shard]:
        """What this rank writes: over all ranks, every element of every kind exactly once."""

    def loaded(self) -> Iterator[Shard]:
        """What this rank fills to hold its part of the state again."""

    def frozen(self) -> Iterator[Shard]:
        """This rank's part of the weights that are not trained, to be filled: no checkpoint has
        them."""

    def updated(self) -> Updated:
        """What of the parameters this rank's optimizer updates."""

    def counters(self) -> dict[str, float]:
        """The optimizer's own step counters, the same for every parameter."""

    def finish_load(self, counters: Mapping[str, float]) -> None:
        """Set the counters, and whatever follows from the filled ranges."""


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
                if optimizer.state.get(tensor):
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


def state_kinds(optimizer: torch.optim.Optimizer, tensor: Tensor) -> list[str]:
    """Names of one parameter's states that a checkpoint holds."""
    if isinstance(optimizer, LowPrecisionAdamW):
        return list(MOMENTS)
    state = optimizer.state[tensor]
    return [k for k, v in state.items() if isinstance(v, Tensor) and v.dim() > 0]


def counters(optimizer: torch.optim.Optimizer, tensor: Tensor) -> dict[str, float]:
    """The scalar states of one parameter."""
    state = optimizer.state[tensor]
    return {
        name: float(value)
        for name, value in state.items()
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)
    }


def read_state(optimizer: torch.optim.Optimizer, tensor: Tensor, kind: str) -> Tensor:
    """A kind of state of `tensor` (or `PARAM`), in fp32; in low precision a decoded copy, flat."""
    if isinstance(optimizer, LowPrecisionAdamW):
        return optimizer.read(tensor, kind)
    state: Tensor = tensor if kind == PARAM else optimizer.state[tensor][kind]
    return state


def write_state(
    optimizer: torch.optim.Optimizer, tensor: Tensor, kind: str, values: Tensor
) -> None:
    """Encode what was filled after `read_state`; elsewhere that was live memory already."""
    if isinstance(optimizer, LowPrecisionAdamW):
        optimizer.write(tensor, kind, values)


def set_counters(state: dict[str, Any], values: Mapping[str, float]) -> None:
    """Write scalar states in place, keeping their types, where a parameter has them."""
    for name, value in values.items():
        if name not in state:
            continue
        if isinstance(state[name], Tensor):
            state[name].fill_(value)
        else:
            state[name] = type(state[name])(value)


class NativeState:
    """`TrainingState` of single, DDP, FSDP2 and ZeRO 0: a module whose parameters are plain tensors
    or rows of DTensors, and a torch optimizer over them.

    Ranks that hold the same elements (all ranks of DDP, the replicas of hybrid FSDP) share the
    writing of them evenly.

    Args:
        module: the (wrapped, sharded) model.
        optimizer: over its parameters.
        copies: which copy of plain tensors this rank holds, and how many there are; one for each
            rank of the process group where that is not said.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        copies: tuple[int, int] | None = None,
    ) -> None:
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        named = dict(inner.named_parameters())
        self._parameters = {name: p for name, p in named.items() if p.requires_grad}
        self._frozen = {name: p for name, p in named.items() if not p.requires_grad}
        self._optimizer = optimizer
        self._copies = _ranks() if copies is None else copies
        create_states(optimizer, [(group, group["params"]) for group in optimizer.param_groups])
        self.shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}
        self._first = next(iter(self._parameters.values()))
        self._kinds = {name: state_kinds(optimizer, p) for name, p in self._parameters.items()}
        found = dict.fromkeys(kind for kinds in self._kinds.values() for kind in kinds)
        self.kinds = (PARAM, *found)
        self.own_shapes = {
            kind: shapes for kind in found if (shapes := self._shapes_of(kind)) != self.shapes
        }

    def saved(self) -> Iterator[Shard]:
        """This rank's share of the ranges it holds."""
        for shard, copy, copies in self._held():
            begin, end = even_part(shard.data.numel(), copy, copies)
            yield replace(shard, start=shard.start + begin, data=shard.data[begin:end])

    def loaded(self) -> Iterator[Shard]:
        """All ranges this rank holds."""
        for shard, _, _ in self._held():
            yield shard  # and have it filled, before going on
            parameter = self._parameters[shard.name]
            write_state(self._optimizer, parameter, shard.kind, shard.data)

    def frozen(self) -> Iterator[Shard]:
        """All that this rank holds of them."""
        for name, parameter in self._frozen.items():
            data, start, _, _ = _local_range(parameter, self._copies)
            yield Shard(name=name, kind=PARAM, start=start, data=data)

    def updated(self) -> Updated:
        """The parameters themselves."""
        pieces = []
        for name, parameter in self._parameters.items():
            data, start, _, _ = _local_range(parameter, self._copies)
            pieces.append(Piece(name=name, start=start, numel=data.numel(), tensor=parameter))
        return Updated(optimizer=self._optimizer, pieces=pieces)

    def counters(self) -> dict[str, float]:
        """Adam's step; SGD has none."""
        return counters(self._optimizer, self._first)

    def finish_load(self, counters: Mapping[str, float]) -> None:
        """The ranges are the parameters themselves: only the counters are left."""
        for parameter in self._parameters.values():
            set_counters(self._optimizer.state[parameter], counters)

    def _held(self) -> Iterator[tuple[Shard, int, int]]:
        """(range, which copy of it this rank holds, how many copies there are)."""
        for name, parameter in self._parameters.items():
            for kind in (PARAM, *self._kinds[name]):
                tensor = read_state(self._optimizer, parameter, kind)
                encoded = is_dtensor(parameter) and not is_dtensor(tensor)
                tensor_here = parameter if encoded else tensor
                data, start, copy, copies = _local_range(tensor_here, self._copies)
                data = tensor if encoded else data
                yield Shard(name=name, kind=kind, start=start, data=data), copy, copies

    def _shapes_of(self, kind: str) -> dict[str, tuple[int, ...]]:
        return {
            name: self.shapes[name]
            if isinstance(self._optimizer, LowPrecisionAdamW)
            else tuple(self._optimizer.state[parameter][kind].shape)
            for name, parameter in self._parameters.items()
            if kind in self._kinds[name]
        }


def _ranks() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _local_range(tensor: Tensor, whole_copies: tuple[int, int]) -> tuple[Tensor, int, int, int]:
    """(flat local elements, offset of the first, which copy this is, copies there are)."""
    if not is_dtensor(tensor):
        return tensor.detach().view(-1), 0, *whole_copies
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    copy, copies = 0, 1
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # every rank is in the mesh
    for index, size, placement in zip(coordinate, mesh.shape, placements, strict=True):
        if placement.is_replicate():
            copy, copies = copy * size + index, copies * size
    row_elements = math.prod(tensor.shape[1:])
    return tensor.to_local().detach().view(-1), offset[0] * row_elements, copy, copies
