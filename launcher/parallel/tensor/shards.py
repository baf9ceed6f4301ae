"""Tensor-parallel shards of parameters: ranges of rows or of columns."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from launcher.model.config import ModelConfig
from launcher.model.foreign.config import ForeignConfig
from launcher.model.parts import block_of, projection_of, projections
from launcher.parallel.mesh import ModelParallelRank, TensorRank
from launcher.parallel.places import Places
from launcher.util.sizes import even_part

Bounds = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """A rank's shard of a parameter: ranges of its rows, or one range of its columns.

    Several matrices that are one parameter are below each other, with as many rows of each.
    """

    full_shape: tuple[int, ...]
    rows: tuple[Bounds, ...] = ()
    columns: Bounds | None = None

    @property
    def replicated(self) -> bool:
        """The shard is the whole parameter."""
        return not self.rows and self.columns is None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the shard."""
        if self.columns is not None:
            return (*self.full_shape[:-1], self.columns[1] - self.columns[0])
        if not self.rows:
            return self.full_shape
        # [experts, rows, width]: `rows` count through all experts, and each gives as many.
        *matrices, _, width = self.full_shape if self.full_shape[1:] else (*self.full_shape, 0)
        count = sum(end - begin for begin, end in self.rows) // math.prod(matrices)
        return (*matrices, count, width) if self.full_shape[1:] else (count,)

    def take(self, value: Tensor) -> Tensor:
        """Return the shard of a full value."""
        if self.columns is not None:
            return value[..., slice(*self.columns)].contiguous()
        if not self.rows:
            return value
        below = value.flatten(0, max(0, value.ndim - 2))
        return torch.cat([below[begin:end] for begin, end in self.rows]).view(self.shape)

    def ranges(self, first: int, last: int) -> Iterator[tuple[int, Places]]:
        """Yield (first element, places in the flattened parameter) of the ranges that elements
        [first, last) of the flattened shard consist of."""
        if self.columns is not None:
            pitch, (left, right) = self.full_shape[-1], self.columns
            numel, run = math.prod(self.shape), right - left
            yield from Places.of(left, numel, run, pitch).pieces(first, last)
            return
        if self.replicated:
            if first < last:
                yield first, Places.of(first, last - first, None, None)
            return
        width, offset = math.prod(self.full_shape[1:][-1:]), 0
        for begin, end in self.rows:
            numel = (end - begin) * width
            low, high = max(first, offset), min(last, offset + numel)
            if low < high:
                yield low, Places.of(begin * width + low - offset, high - low, None, None)
            offset += numel


def shard_of(
    name: str, full_shape: Sequence[int], model: ModelConfig, rank: ModelParallelRank
) -> ParameterShard:
    """Return a rank's shard of the parameter `name`.

    Attention is sharded by heads and the MLP by its width, in both of its products; the tables of
    tokens and positions by rows, as evenly as can be. Norms, and biases that are added to a sum,
    are replicated. Of a decoder of transformers its plan says so.
    """
    whole = ParameterShard(tuple(full_shape))
    if rank.tensor is None:
        return whole
    if isinstance(model, ForeignConfig):
        return _planned(name, whole, model, rank.tensor)
    if block_of(name) is None and len(full_shape) == 2:
        return replace(whole, rows=(bounds(full_shape[0], rank.tensor),))
    if (inner := projection_of(name)) is None:
        return whole
    projection = projections(model)[inner]
    if not projection.into_residual:
        return replace(whole, rows=_sections(projection.sizes, rank.tensor))
    return replace(whole, columns=bounds(full_shape[1], rank.tensor)) if full_shape[1:] else whole


def _planned(
    name: str, whole: ParameterShard, model: ForeignConfig, rank: TensorRank
) -> ParameterShard:
    from launcher.model.foreign.matrices import shard_axis  # not in a browser's planner

    match shard_axis(name, model):
        case "rows":
            return replace(whole, rows=(bounds(whole.full_shape[0], rank),))
        case "columns":
            return replace(whole, columns=bounds(whole.full_shape[-1], rank))
        case "packed":
            experts, both, _ = whole.full_shape
            return replace(whole, rows=_sections([both // 2] * 2 * experts, rank))
    return whole


def bounds(total: int, rank: TensorRank) -> Bounds:
    """Return a rank's range of `total`, as even as can be."""
    return even_part(total, rank.index, rank.size)


def _sections(sizes: Sequence[int], rank: TensorRank) -> tuple[Bounds, ...]:
    """Return a rank's range of each of consecutive sections."""
    found, begin = [], 0
    for size in sizes:
        low, high = bounds(size, rank)
        found.append((begin + low, begin + high))
        begin += size
    return tuple(found)
