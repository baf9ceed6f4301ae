"""Run an exported graph: ONNX Runtime on the CPU, or any other function of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from launcher.model.config import ModelConfig
from launcher.tools.serve.graph import LayerCache, input_names


class NoKernel(Exception):
    """The runtime lacks an operator in the graph's dtype."""


@dataclass(frozen=True, slots=True)
class GraphSession:
    """A graph of `launcher.tools.serve.graph.write_graph`, loaded into a runtime."""

    run: Callable[[Sequence[Tensor]], list[Tensor]]
    """Graph inputs to outputs, both in the graph's order."""

    def score(self, tokens: Tensor) -> Tensor:
        """Compute logits [B, T, V] of tokens [B, T]; for a graph without a cache."""
        return self.run([tokens])[0]

    def extend(
        self,
        tokens: Tensor,
        past: Sequence[LayerCache],
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, list[LayerCache]]:
        """Compute logits [B, T, V] of tokens [B, T] after a cache of P tokens, and the new cache.

        Without mask [B, P + T] and positions [B, T], nothing is padding.
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


def onnx_session(path: Path, config: ModelConfig, *, cache: bool) -> GraphSession:
    """Load a graph into ONNX Runtime on the CPU, with as many threads as torch uses.

    Raises:
        NoKernel: ONNX Runtime has no kernels for the weights' dtype (bf16).
    """
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as states

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
    except states.NotImplemented as error:
        raise NoKernel(str(error)) from None
    names = input_names(config, cache=cache)

    def run(values: Sequence[Tensor]) -> list[Tensor]:
        arrays = (value.numpy() for value in values)
        return [
            torch.from_numpy(array)
            for array in session.run(None, dict(zip(names, arrays, strict=True)))
        ]

    return GraphSession(run)
