"""The training state of single, DDP, FSDP2 and ZeRO 0: plain tensors, or rows of DTensors."""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from launcher.optim.dtensor import is_dtensor
from launcher.optim.low_precision import LowPrecisionAdamW
from launcher.strategies.flat_shards import (
    PARAM,
    Shard,
    counters,
    create_states,
    element_count,
    even_part,
    read_state,
    set_counters,
    state_kinds,
    write_state,
)


class NativeState:
    """`TrainingState` of a module and a torch optimizer over its parameters.

    Ranks that hold the same elements (all ranks of DDP, the replicas of hybrid FSDP) share the
    writing of them evenly.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        self._parameters = dict(inner.named_parameters())
        self._optimizer = optimizer
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
            yield Shard(
                name=shard.name,
                kind=shard.kind,
                shape=shard.shape,
                start=shard.start + begin,
                data=shard.data[begin:end],
            )

    def loaded(self) -> Iterator[Shard]:
        """All ranges this rank holds."""
        for shard, _, _ in self._held():
            yield shard  # and have it filled, before going on
            parameter = self._parameters[shard.name]
            write_state(self._optimizer, parameter, shard.kind, shard.data)

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
                data, start, copy, copies = _local_range(parameter if encoded else tensor)
                shard = Shard(
                    name=name,
                    kind=kind,
                    shape=self.own_shapes.get(kind, self.shapes)[name],
                    start=start,
                    data=tensor if encoded else data,
                )
                yield shard, copy, copies

    def _shapes_of(self, kind: str) -> dict[str, tuple[int, ...]]:
        return {
            name: self.shapes[name]
            if isinstance(self._optimizer, LowPrecisionAdamW)
            else tuple(self._optimizer.state[parameter][kind].shape)
            for name, parameter in self._parameters.items()
            if kind in self._kinds[name]
        }


def _local_range(tensor: Tensor) -> tuple[Tensor, int, int, int]:
    """(flat local elements, offset of the first, which copy this is, copies there are)."""
    if not is_dtensor(tensor):
        ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return tensor.detach().view(-1), 0, *ranks
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    copy, copies = 0, 1
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # every rank is in the mesh
    for index, size, placement in zip(coordinate, mesh.shape, placements, strict=True):
        if placement.is_replicate():
            copy, copies = copy * size + index, copies * size
    row_elements = element_count(tensor.shape[1:])
    return tensor.to_local().detach().view(-1), offset[0] * row_elements, copy, copies
