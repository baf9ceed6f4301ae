"""What runs a graph: ONNX Runtime on the CPU, or whatever else takes and gives tensors."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from launcher.model.config import ModelConfig
from launcher.tools.serve.graph import LayerCache, input_names


class NoKernel(Exception):
    """The runtime has none for an operator in the graph's type."""


class Runtime(abc.ABC):
    """Runs what `launcher.tools.serve.graph.write_graph` has written."""

    @abc.abstractmethod
    def run(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The graph's outputs for its inputs, both in order."""

    def score(self, tokens: Tensor) -> Tensor:
        """The logits [B, T, V] of tokens [B, T], of a graph without a cache."""
        return self.run([tokens])[0]

    def extend(
        self,
        tokens: Tensor,
        past: Sequence[LayerCache],
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, list[LayerCache]]:
        """The logits [B, T, V] of tokens [B, T] behind `past`, of length P, and `past` with them.

        Without mask [B, P + T] and positions [B, T] nothing is padding.
        """
        batch, length = tokens.shape
        before = past[0][0].size(2)
        if mask is None:
            mask = tokens.new_ones(batch, before + length)
        if positions is None:
            positions = torch.arange(before, before + length, device=tokens.device)
            positions = positions.expand(batch, -1).contiguous()
        held = [part for layer in past for part in layer]
        logits, *present = self.run([tokens, mask, positions, *held])
        return logits, list(zip(present[::2], present[1::2], strict=True))


class OnnxSession(Runtime):
    """ONNX Runtime on the CPU, with as many threads as torch has.

    Raises:
        NoKernel: it has none for the type of the weights (bf16).
    """

    def __init__(self, path: Path, config: ModelConfig, *, cache: bool) -> None:
        import onnxruntime
        from onnxruntime.capi import onnxruntime_pybind11_state as states

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        options.intra_op_num_threads = torch.get_num_threads()
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except states.NotImplemented as error:
            raise NoKernel(str(error)) from None
        self._names = input_names(config, cache=cache)

    def run(self, values: Sequence[Tensor]) -> list[Tensor]:
        arrays = (value.numpy() for value in values)
        found = self._session.run(None, dict(zip(self._names, arrays, strict=True)))
        return [torch.from_numpy(array) for array in found]
