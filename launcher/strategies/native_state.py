"""The training state of modules whose parameters are plain tensors or DTensors, and of ranks that
hold tensor-parallel shards of a model."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from launcher.optim.dtensor import is_dtensor
from launcher.parallel.model_parallel import ModelShards
from launcher.parallel.tensor.shards import ParameterShard
from launcher.strategies.flat_shards import (
    PARAM,
    OwnShapes,
    Shard,
    TrainingState,
    Updated,
    UpdatedRange,
    counters,
    create_states,
    reads_in_pieces,
    set_counters,
    state_kinds,
    state_of,
)
from launcher.util.sizes import even_part


def native_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, shards: ModelShards | None
) -> TrainingState:
    """Return the state of a module of plain tensors or DTensors, and of its torch optimizer."""
    if shards is None:
        return NativeState(module, optimizer)
    copies = (shards.data_parallel.rank, shards.data_parallel.size)
    return ModelShardState(NativeState(module, optimizer, copies), shards)


class NativeState:
    """`TrainingState` of single, DDP, FSDP2 and ZeRO 0: a module whose parameters are plain tensors
    or shards of DTensors, and a torch optimizer over them.

    Ranks that hold the same elements (all ranks of DDP, the replicas of hybrid FSDP) divide the
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
        # A state can be asked for before the first step has made any.
        create_states(optimizer, [(group, group["params"]) for group in optimizer.param_groups])
        self.shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}
        # Of two optimizers that share the parameters, one may count no steps.
        trained = list(self._parameters.values())
        self._counted = next((p for p in trained if counters(optimizer, p)), trained[0])
        self._kinds = {name: state_kinds(optimizer, p) for name, p in self._parameters.items()}
        found = dict.fromkeys(kind for kinds in self._kinds.values() for kind in kinds)
        self.kinds = (PARAM, *found)
        self.own_shapes = {
            kind: shapes for kind in found if (shapes := self._shapes_of(kind)) != self.shapes
        }

    def saved(self) -> Iterator[Shard]:
        """Yield an even part of each range per rank that holds a copy of it."""
        yield from self._shards(filled=False)

    def loaded(self) -> Iterator[Shard]:
        """Yield all ranges that this rank holds."""
        yield from self._shards(filled=True)

    def frozen(self) -> Iterator[Shard]:
        """Yield the local ranges of frozen parameters."""
        for name, parameter in self._frozen.items():
            data, cut, _, _ = _local_part(parameter, self._copies)
            yield from _placed(name, PARAM, data, cut)

    def updated(self) -> Updated:
        """Return the parameters themselves."""
        ranges = []
        for name, parameter in self._parameters.items():
            data, cut, _, _ = _local_part(parameter, self._copies)
            if cut.columns is None:  # of experts, which have no masks
                start = sum(places.start for _, places in cut.ranges(0, data.numel()))
                held = UpdatedRange(name=name, start=start, numel=data.numel(), tensor=parameter)
                ranges.append(held)
        return self._optimizer, ranges

    def counters(self) -> dict[str, float]:
        """Return Adam's step; SGD has none."""
        return counters(self._optimizer, self._counted)

    def finish_load(self, counters: Mapping[str, float]) -> None:
        """The ranges are the parameters themselves: only the counters are left."""
        for parameter in self._parameters.values():
            set_counters(self._optimizer.state[parameter], counters)

    def _shards(self, *, filled: bool) -> Iterator[Shard]:
        """Yield this rank's share of what it holds. `filled`: yield all of it, to be filled with
        other values before the next one is asked for."""
        for name, parameter in self._parameters.items():
            for kind in (PARAM, *self._kinds[name]):
                tensor, pieces = parameter, None
                if reads_in_pieces(self._optimizer):  # low precision, decoded
                    pieces = self._optimizer.pieces(parameter, kind, filled=filled)
                else:
                    tensor = state_of(self._optimizer, parameter, kind)
                whole, cut, copy, copies = _local_part(tensor, self._copies)
                for first, data in pieces or [(0, whole)]:
                    begin, end = 0, data.numel()
                    if not filled:
                        begin, end = even_part(end, copy, copies)
                    yield from _placed(name, kind, data[begin:end], cut, first + begin)

    def _shapes_of(self, kind: str) -> dict[str, tuple[int, ...]]:
        return {
            name: self.shapes[name]
            if reads_in_pieces(self._optimizer)
            else tuple(self._optimizer.state[parameter][kind].shape)
            for name, parameter in self._parameters.items()
            if kind in self._kinds[name]
        }


def _placed(
    name: str, kind: str, data: Tensor, cut: ParameterShard, first: int = 0
) -> Iterator[Shard]:
    """Yield `data`, a rank's elements from `first` on, where they lie in the whole tensor."""
    for number, places in cut.ranges(first, first + data.numel()):
        own = data[number - first :][: places.numel]
        yield Shard.at(places, name=name, kind=kind, data=own)


def _ranks() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _local_part(
    tensor: Tensor, whole_copies: tuple[int, int]
) -> tuple[Tensor, ParameterShard, int, int]:
    """Return (flat local elements, their place in the tensor, which copy this is, of how many)."""
    if not is_dtensor(tensor):
        return tensor.detach().view(-1), ParameterShard((tensor.numel(),)), *whole_copies
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    copy, copies, divided = 0, 1, 0
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # every rank is in the mesh
    for index, size, placement in zip(coordinate, mesh.shape, placements, strict=True):
        if placement.is_shard():
            divided = cast(Any, placement).dim
        else:
            copy, copies = copy * size + index, copies * size
    # As a matrix: rows before the divided dimension, in each of them a rank's part of the rest.
    inner = math.prod(tensor.shape[divided + 1 :])
    rows, width = math.prod(tensor.shape[:divided]), tensor.shape[divided] * inner
    first, last = offset[divided] * inner, (offset[divided] + shape[divided]) * inner
    data = tensor.to_local().detach().view(-1)
    if rows == 1:
        return data, ParameterShard((width,), rows=((first, last),)), copy, copies
    return data, ParameterShard((rows, width), columns=(first, last)), copy, copies


class ModelShardState:
    """`TrainingState` of model shards: the inner state's ranges, placed in the full tensors.

    Each rank of the group writes an even part of what is replicated on all of them.
    """

    def __init__(self, inner: TrainingState, shards: ModelShards) -> None:
        self._inner = inner
        self.shards = shards
        self.shapes = {name: shards.of[name].full_shape for name in inner.shapes}
        self.kinds = inner.kinds
        self.own_shapes: OwnShapes = {}  # of optimizers that are not elementwise: refused
        self.updated = inner.updated  # within shards; masks are refused with tensor parallelism
        self.counters, self.finish_load = inner.counters, inner.finish_load

    def saved(self) -> Iterator[Shard]:
        """Yield the ranges that this rank writes."""
        index, size = self.shards.model_parallel.shard_index
        for shard in _runs(self._inner.saved()):
            if self.shards.of[shard.name].replicated:
                begin, end = even_part(shard.data.numel(), index, size)
                yield replace(shard, start=shard.start + begin, data=shard.data[begin:end])
            else:
                yield from self._placed(shard)

    def loaded(self) -> Iterator[Shard]:
        """Yield all that this rank holds."""
        for shard in _runs(self._inner.loaded()):
            yield from self._placed(shard)  # views: filled before the inner state goes on

    def frozen(self) -> Iterator[Shard]:
        """None: adapters are refused with tensor parallelism."""
        return iter(())

    def _placed(self, shard: Shard) -> Iterator[Shard]:
        cut = self.shards.of[shard.name]
        return _placed(shard.name, shard.kind, shard.data, cut, shard.start)


def _runs(shards: Iterable[Shard]) -> Iterator[Shard]:
    """Yield each run of shards with gaps by itself."""
    for shard in shards:
        places = shard.places
        for begin in range(0, places.numel, max(1, places.run)):
            data = shard.data[begin : begin + places.run]
            yield replace(shard, start=places.place(begin), data=data, run=None, pitch=None)
