"""Weights that are quantised as they are read, a few rows at a time."""

import torch

from launcher.checkpoint.checkpointer import Weights
from launcher.checkpoint.index import CHUNK_ELEMENTS
from launcher.model.config import ModelConfig
from launcher.model.linears import PACKED, inner_of, quantize, row_bytes, weight_of
from launcher.strategies.flat_shards import PARAM, Shard
from launcher.strategies.parameters import parameter_shapes


class Quantized:
    """What `weights` holds, for a model whose projections are quantised.

    Nowhere is more of a weight than the rows of 4 MiB in fp32.
    """

    def __init__(self, weights: Weights, model: ModelConfig) -> None:
        self._weights, self._kind = weights, model.quantize_base
        self._shapes = parameter_shapes(model)

    def has(self, name: str) -> bool:
        """Under the name that it has here."""
        return self._weights.has(weight_of(name) if name.endswith(PACKED) else name)

    def read_into(self, shard: Shard) -> None:
        """Fill a range, of bytes where it is of a quantised weight."""
        if not shard.name.endswith(PACKED):
            self._weights.read_into(shard)
            return
        inner = inner_of(self._shapes[shard.name][1], self._kind)
        width = row_bytes(inner, self._kind)
        rows = max(1, CHUNK_ELEMENTS // inner)
        last = -(-shard.stop // width)
        for first in range(shard.start // width, last, rows):
            end = min(first + rows, last)
            data = torch.empty((end - first) * inner)
            part = Shard(name=weight_of(shard.name), kind=PARAM, start=first * inner, data=data)
            self._weights.read_into(part)
            weight = data.to(shard.data.device).view(-1, inner)
            packed = quantize(weight, self._kind).flatten()
            begin, stop = max(first * width, shard.start), min(end * width, shard.stop)
            target = shard.data[begin - shard.start : stop - shard.start]
            target.copy_(packed[begin - first * width : stop - first * width])
