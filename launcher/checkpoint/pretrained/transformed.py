"""Weights that are computed as they are read: adapters merged, or projections quantized."""

import dataclasses

import torch
from torch import Tensor

from launcher.checkpoint.checkpointer import ReadableWeights
from launcher.checkpoint.index import CHUNK_ELEMENTS
from launcher.checkpoint.pretrained.folder_weights import Stored
from launcher.model.config import ModelConfig
from launcher.model.foreign.config import ForeignConfig
from launcher.model.linears import (
    PACKED,
    dequantize,
    inner_of,
    quantize,
    row_bytes,
    weight_of,
)
from launcher.model.parts import projection_of, projections
from launcher.strategies.flat_shards import PARAM, Shard
from launcher.strategies.parameters import parameter_shapes


class Quantized:
    """Weights for a model with quantized projections, of which 4 MiB in fp32 are read at a time."""

    def __init__(self, weights: ReadableWeights, model: ModelConfig) -> None:
        self._weights, self._kind = weights, model.quantize_base
        self._shapes = parameter_shapes(model)

    def has(self, name: str) -> bool:
        """Return whether there is such a parameter of the quantized model."""
        return self._weights.has(weight_of(name) if name.endswith(PACKED) else name)

    def read_into(self, shard: Shard) -> None:
        """Fill a range, of packed bytes for a quantized weight."""
        if not shard.name.endswith(PACKED):
            self._weights.read_into(shard)
            return
        inner = inner_of(self._shapes[shard.name][1], self._kind)
        width = row_bytes(inner, self._kind)
        rows = max(1, CHUNK_ELEMENTS // inner)
        last = -(-shard.stop // width)
        # Whole rows are quantised, also where the range begins or ends within one.
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


class Merged:
    """Plain weights that compute the same: each adapter's product is added to its weight."""

    def __init__(self, model: Stored) -> None:
        assert model.config.lora is not None
        self._model, self._lora = model, model.config.lora
        self._quantized, self._packed = model.config.quantize_base, parameter_shapes(model.config)
        self.config = dataclasses.replace(model.config, lora=None, quantize_base="none")
        self.checkpoint = model.checkpoint

    def read(self, name: str) -> Tensor:
        """Return a parameter of the plain model."""
        weight = self._model.read(name)
        module = name.removesuffix(".weight")
        if module + PACKED in self._packed:  # what the adapters were trained with
            packed = quantize(weight.float(), self._quantized)
            weight = dequantize(packed, weight.size(1), self._quantized, torch.float32)
        if not self._model.has(f"{module}.lora_a"):
            return weight
        a, b = (self._model.read(f"{module}.lora_{part}").float() for part in "ab")
        if isinstance(self.config, ForeignConfig):  # where a matrix is one
            return torch.addmm(weight.float(), b, a, alpha=self._lora.scale)
        projection = projection_of(module)
        assert projection is not None
        sizes = projections(self.config)[projection].sizes
        blocks = torch.block_diag(*b.split(list(sizes)))
        return torch.addmm(weight.float(), blocks, a, alpha=self._lora.scale)
