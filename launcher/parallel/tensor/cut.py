"""Which part of each parameter a rank has."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from launcher.model.config import ModelConfig
from launcher.parallel.mesh import TensorRank
from launcher.util.sizes import even_part

Bounds = tuple[int, int]


class Piece(NamedTuple):
    """Elements [offset, offset + numel) of a flattened part lie in the flattened whole from `start`
    on: in runs of `run` elements, one every `pitch`; None for one run."""

    offset: int
    numel: int
    start: int
    run: int | None = None
    pitch: int | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank has of a parameter: ranges of its rows, or one range of its columns."""

    whole: tuple[int, ...]
    rows: tuple[Bounds, ...] = ()
    columns: Bounds | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is all of it."""
        return not self.rows and self.columns is None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        if self.columns is not None:
            return (self.whole[0], self.columns[1] - self.columns[0])
        if self.rows:
            return (sum(end - begin for begin, end in self.rows), *self.whole[1:])
        return self.whole

    def take(self, value: Tensor) -> Tensor:
        """The part of the whole value."""
        if self.columns is not None:
            return value[:, slice(*self.columns)].contiguous()
        return torch.cat([value[begin:end] for begin, end in self.rows]) if self.rows else value

    def pieces(self, first: int, last: int) -> Iterator[Piece]:
        """Where elements [first, last) of the flattened part are in the flattened whole."""
        if self.columns is not None:
            yield from self._of_columns(first, last)
            return
        width, offset = math.prod(self.whole[1:]), 0
        for begin, end in self.rows or ((0, self.whole[0]),):
            numel = (end - begin) * width
            low, high = max(first, offset), min(last, offset + numel)
            if low < high:
                yield Piece(low, high - low, begin * width + low - offset)
            offset += numel

    def _of_columns(self, first: int, last: int) -> Iterator[Piece]:
        """Whole rows are runs of one length; those that are cut at the ends stand alone."""
        assert self.columns is not None
        pitch, (left, right) = self.whole[1], self.columns
        run = right - left
        begin = min(-(-first // run) * run, last)  # of the first whole row
        edges = (first, begin, max(begin, last // run * run), last)
        for low, high in itertools.pairwise(edges):
            if low == high:
                continue
            row, column = divmod(low, run)
            start = row * pitch + left + column
            strided = high - low > run
            yield Piece(low, high - low, start, *((run, pitch) if strided else ()))


def cut_of(name: str, whole: Sequence[int], model: ModelConfig, share: TensorRank | None) -> Cut:
    """How the parameter `name` of a model is cut.

    Attention by heads and the MLP by its width, in and out again; the tables of tokens and
    positions by rows, as evenly as can be. Norms, and biases that are added to a sum, stay whole.
    """
    cut = Cut(tuple(whole))
    if share is None:
        return cut
    owner, _, kind = name.rpartition(".")
    if owner in ("wte", "wpe", "head"):
        return replace(cut, rows=(bounds(whole[0], share),))
    if owner.endswith("attn.qkv"):
        keys = model.kv_head_count * model.head_size
        return replace(cut, rows=_sections([model.attention_dim, keys, keys], share))
    if owner.endswith("mlp.fc"):
        parts = model.up_dim // model.ffn_dim  # swiglu's gate, and what it multiplies
        return replace(cut, rows=_sections(parts * [model.ffn_dim], share))
    if owner.endswith(("attn.proj", "mlp.out")) and kind == "weight":
        return replace(cut, columns=bounds(whole[1], share))
    return cut


def bounds(total: int, share: TensorRank) -> Bounds:
    """A rank's range of `total`, as evenly as can be."""
    return even_part(total, share.index, share.ranks)


def _sections(sizes: Sequence[int], share: TensorRank) -> tuple[Bounds, ...]:
    """The same range of each of the sections that follow each other."""
    found, begin = [], 0
    for size in sizes:
        low, high = bounds(size, share)
        found.append((begin + low, begin + high))
        begin += size
    return tuple(found)
