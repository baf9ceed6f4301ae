"""Masks of pruned weights: a bit for each, sharded as the tensors that the optimizer updates.

They are applied right after the optimizer has updated a tensor. Parameters that compute are copied
or gathered from that afterwards, under every strategy, and so have the same zeros. Element i of a
mask is bit i % 8, from the lowest, of byte i // 8.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from launcher.model.parts import is_projection
from launcher.optim.dtensor import local_part
from launcher.strategies.engine import Engine, StorageCount
from launcher.strategies.flat_shards import (
    MASK,
    PARAM,
    Shard,
    TrainingState,
    Updated,
    UpdatedRange,
)

CHUNK_ELEMENTS: Final = 2**20
"""Bits that are unpacked at a time; a multiple of 8."""
UNPACKED_BYTES: Final = 2
"""Bytes for each of them: its bit alone, and whether that is 0."""


class Masks:
    """Masks of one rank, which keep all weights until they are filled.

    A bit at either end of a range can share its byte with the next rank's: both hold that byte.

    Args:
        updated: what the rank's optimizer updates.
    """

    def __init__(self, updated: Updated) -> None:
        optimizer, ranges = updated
        self._bits: dict[str, Tensor] = {}
        self._first: dict[str, int] = {}
        self._ranges: defaultdict[Tensor, list[UpdatedRange]] = defaultdict(list)
        for held in ranges:
            if is_projection(held.name) and held.numel > 0:
                size_bytes = bytes_of(held.start, held.numel)
                device = local_part(held.tensor).device
                self._bits[held.name] = torch.full(
                    (size_bytes,), 255, dtype=torch.uint8, device=device
                )
                self._first[held.name] = held.start // 8
                self._ranges[held.tensor].append(held)
        optimizer.register_step_post_hook(self._hold)

    @property
    def tensors(self) -> list[Tensor]:
        """Return all bits."""
        return list(self._bits.values())

    def loaded(self) -> Iterator[Shard]:
        """Yield all bytes, to be filled."""
        for name, bits in self._bits.items():
            yield Shard(name=name, kind=MASK, start=self._first[name], data=bits)

    def saved(self, weights: Shard) -> Iterator[Shard]:
        """Yield the bytes that go with a range of weights: those whose first bit is of a weight in
        it, so that ranges which hold each weight once give each byte once."""
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
                # in pure bf16 beside it, what rounding has cut off each value
                rest = optimizer.state[tensor].get("compensation")
                for values in (tensor,) if rest is None else (tensor, rest):
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
        """Yield each range of weights, followed by its masks."""
        for shard in self._inner.saved():
            yield shard
            yield from self._masks.saved(shard)

    def loaded(self) -> Iterator[Shard]:
        """Yield all that this rank holds, the masks at the end."""
        yield from self._inner.loaded()
        yield from self._masks.loaded()


class MaskedEngine:
    """Any engine, with masks held."""

    def __init__(self, engine: Engine) -> None:
        self.inner = engine
        self._masks = Masks(engine.training_state().updated())
        self.begin_step, self.step = engine.begin_step, engine.step
        self.forward, self.backward = engine.forward, engine.backward
        self.evaluate, self.routed = engine.evaluate, engine.routed
        self.loss_scale, self.set_loss_scale = engine.loss_scale, engine.set_loss_scale

    def count_states(self) -> StorageCount:
        """Return the engine's, and the masks."""
        count = self.inner.count_states()
        count.add("masks", self._masks.tensors)
        return count

    def training_state(self) -> TrainingState:
        """Return the engine's, with the masks."""
        return MaskedState(self.inner.training_state(), self._masks)


def mask_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the name of each parameter with a mask -> shape of the mask in bytes."""
    return {n: (-(-math.prod(s) // 8),) for n, s in shapes.items() if is_projection(n)}


def bytes_of(start: int, numel: int) -> int:
    """Return the bytes of bits [start, start + numel), which begin and end anywhere in a byte."""
    return -(-(start + numel) // 8) - start // 8 if numel else 0


def pack(mask: Tensor) -> Tensor:
    """mask, bool of any shape -> uint8 [ceil(elements / 8)]; what is left of the last byte is 0."""
    flat = mask.flatten()
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % 8)).view(-1, 8)
    return (padded * _powers(mask.device)).sum(dim=1, dtype=torch.uint8)


def zero(values: Tensor, bits: Tensor, *, skip: int) -> None:
    """Set to 0 the values, flat, whose bit is 0; bit number `skip` of all is the first one's.

    A chunk at a time: nothing of the size of the values is allocated.
    """
    for begin in range(0, len(values), CHUNK_ELEMENTS):
        part = values[begin : begin + CHUNK_ELEMENTS]
        # Chunks are multiples of 8, so that each skips as many bits of its first byte.
        own = bits[(skip + begin) // 8 : -(-(skip + begin + len(part)) // 8)]
        part.masked_fill_(_is_zero(own, len(part), skip), 0)


def _is_zero(bits: Tensor, numel: int, skip: int) -> Tensor:
    alone = bits.unsqueeze(1) & _powers(bits.device)
    return (alone == 0).view(-1)[skip : skip + numel]


def _powers(device: torch.device) -> Tensor:
    """[1, 2, 4, ..., 128], made on the device, so that no step waits for a copy."""
    return 1 << torch.arange(8, dtype=torch.uint8, device=device)
