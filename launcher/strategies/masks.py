"""Masks of pruned weights: a bit for each, cut as what the optimizer updates is cut.

Held where an optimizer has just updated a tensor: what is computed with is copied or gathered from
that afterwards, under every strategy, and so has the same zeros.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from launcher.model.parts import is_projection
from launcher.optim.dtensor import local_part
from launcher.strategies.engine import Engine
from launcher.strategies.flat_shards import (
    MASK,
    PARAM,
    Shard,
    TrainingState,
    Updated,
    UpdatedRange,
)
from launcher.strategies.mask_bits import bytes_of, zero
from launcher.strategies.storages import StorageCount


class Masks:
    """Those of one rank, which keep everything until they are filled.

    A bit at either end of a range can share its byte with the next rank's: both hold that byte.

    Args:
        updated: what the rank's optimizer updates.
    """

    def __init__(self, updated: Updated) -> None:
        self._updated = updated
        self._bits: dict[str, Tensor] = {}
        self._first: dict[str, int] = {}
        self._ranges: defaultdict[Tensor, list[UpdatedRange]] = defaultdict(list)
        for held in updated.ranges:
            if is_projection(held.name) and held.numel > 0:
                size_bytes = bytes_of(held.start, held.numel)
                device = local_part(held.tensor).device
                self._bits[held.name] = torch.full(
                    (size_bytes,), 255, dtype=torch.uint8, device=device
                )
                self._first[held.name] = held.start // 8
                self._ranges[held.tensor].append(held)
        updated.optimizer.register_step_post_hook(self._hold)

    @property
    def tensors(self) -> list[Tensor]:
        """All bits."""
        return list(self._bits.values())

    def loaded(self) -> Iterator[Shard]:
        """All bytes, to be filled."""
        for name, bits in self._bits.items():
            yield Shard(name=name, kind=MASK, start=self._first[name], data=bits)

    def saved(self, weights: Shard) -> Iterator[Shard]:
        """The bytes that go with a range of weights: those whose first bit is of a weight in it, so
        that ranges which hold each weight once give each byte once."""
        bits = self._bits.get(weights.name)
        if bits is not None and weights.kind == PARAM:
            begin, end = -(-weights.start // 8), -(-weights.stop // 8)
            first = self._first[weights.name]
            data = bits[begin - first : end - first]
            yield Shard(name=weights.name, kind=MASK, start=begin, data=data)

    @torch.no_grad()
    def _hold(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Called by torch after each step of the optimizer, which in DeepSpeed's hands, or in the
        backward, is one of some tensors only."""
        for tensor in (t for group in optimizer.param_groups for t in group["params"]):
            for held in self._ranges.get(tensor, ()):
                for values in self._updated.stored(tensor):
                    flat = local_part(values).view(-1)[held.offset : held.offset + held.numel]
                    zero(flat, self._bits[held.name], skip=held.start % 8)


class MaskedState:
    """`TrainingState` with masks as one kind more, whose elements are bytes of 8 bits."""

    def __init__(self, inner: TrainingState, masks: Masks) -> None:
        self._inner, self._masks = inner, masks
        self.shapes = inner.shapes
        self.kinds = (*inner.kinds, MASK)
        self.own_shapes = {**inner.own_shapes, MASK: mask_shapes(inner.shapes)}
        self.frozen, self.updated = inner.frozen, inner.updated
        self.counters, self.finish_load = inner.counters, inner.finish_load

    def saved(self) -> Iterator[Shard]:
        """Each range of weights is followed by its masks."""
        for shard in self._inner.saved():
            yield shard
            yield from self._masks.saved(shard)

    def loaded(self) -> Iterator[Shard]:
        """All that this rank holds, the masks at the end."""
        yield from self._inner.loaded()
        yield from self._masks.loaded()


class MaskedEngine:
    """Any engine, with masks held."""

    def __init__(self, engine: Engine) -> None:
        self.inner = engine
        self._masks = Masks(engine.training_state().updated())
        self.begin_step, self.step = engine.begin_step, engine.step
        self.forward, self.backward = engine.forward, engine.backward
        self.evaluate = engine.evaluate
        self.loss_scale, self.set_loss_scale = engine.loss_scale, engine.set_loss_scale

    def count_states(self) -> StorageCount:
        """The engine's, and the masks."""
        count = self.inner.count_states()
        count.add("masks", self._masks.tensors)
        return count

    def training_state(self) -> TrainingState:
        """The engine's, with the masks."""
        return MaskedState(self.inner.training_state(), self._masks)


def mask_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Of the parameters that have a mask -> its bytes."""
    return {n: (-(-math.prod(s) // 8),) for n, s in shapes.items() if is_projection(n)}
