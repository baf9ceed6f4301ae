"""What runs a model: PyTorch as it is or compiled, ONNX Runtime, TensorRT."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from launcher.checkpoint.pretrained.loading import build, open_source
from launcher.model.config import ModelConfig
from launcher.model.decode import Cache
from launcher.model.gpt import GPT
from launcher.tools.serve import engine as tensorrt_engine
from launcher.tools.serve.graph import CachedDecoder, LayerCache, empty_past, write_graph
from launcher.tools.serve.runtime import OnnxSession, Runtime

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.float32}
"""Of the weights; those of projections are int8 after that."""


class Engine(abc.ABC):
    """A model that is ready to be asked; one sequence at a time."""

    @abc.abstractmethod
    def begin(self, capacity: int) -> Callable[[Tensor], Tensor]:
        """A new sequence of at most `capacity` tokens: a function from its next tokens [T], int64
        on the CPU, to the logits [V] behind the last of them."""

    @abc.abstractmethod
    def logits(self, tokens: Tensor) -> Tensor:
        """Those [T, V] of a whole sequence [T]."""


class Eager(Engine):
    """PyTorch, as `shardscale generate` runs it."""

    def __init__(self, model: GPT) -> None:
        self._model, self._device = model, model.wte.weight.device

    def begin(self, capacity: int) -> Callable[[Tensor], Tensor]:
        cache = Cache(self._model, capacity)
        return lambda tokens: cache.extend(tokens.to(self._device))

    def logits(self, tokens: Tensor) -> Tensor:
        found: Tensor = self._model(tokens[None].to(self._device))[0]
        return found


class Compiled(Engine):
    """torch.compile of a step with its cache, for any sizes."""

    def __init__(self, model: GPT) -> None:
        self._model, self._device = model, model.wte.weight.device
        self._step = torch.compile(CachedDecoder(model), dynamic=True)

    def begin(self, capacity: int) -> Callable[[Tensor], Tensor]:
        past = empty_past(self._model, 1)

        def extend(tokens: Tensor) -> Tensor:
            nonlocal past
            logits, past = self._extend(tokens, past)
            return logits[-1]

        return extend

    def logits(self, tokens: Tensor) -> Tensor:
        return self._extend(tokens, empty_past(self._model, 1))[0]

    def _extend(self, tokens: Tensor, past: list[LayerCache]) -> tuple[Tensor, list[LayerCache]]:
        tokens = tokens.to(self._device)[None]
        before, length = past[0][0].size(2), tokens.size(1)
        positions = torch.arange(before, before + length, device=self._device)[None]
        mask = tokens.new_ones(1, before + length)
        logits, present = self._step(tokens, mask, positions, past)
        return logits[0], present


class Graph(Engine):
    """An exported graph, in whatever runs it."""

    def __init__(self, runtime: Runtime, empty: Callable[[], list[LayerCache]]) -> None:
        self._runtime, self._empty = runtime, empty

    def begin(self, capacity: int) -> Callable[[Tensor], Tensor]:
        past = self._empty()

        def extend(tokens: Tensor) -> Tensor:
            nonlocal past
            logits, past = self._runtime.extend(tokens[None], past)
            return logits[0, -1]

        return extend

    def logits(self, tokens: Tensor) -> Tensor:
        return self._runtime.extend(tokens[None], self._empty())[0][0]


def load(run: Path, weights: str, device: torch.device) -> GPT:
    """The model in PyTorch, its projections in int8 where that is asked for."""
    with open_source(run) as source:
        model = build(source, device=device, dtype=DTYPES[weights])
    if weights == "int8":
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        logging.getLogger("torchao").setLevel(logging.ERROR)
        quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model


def prepare(run: Path, weights: str, graph: Path) -> None:
    """Write the graph of a run; of int8 weights beside one in fp32, which it is made of."""
    if weights != "int8":
        write_graph(load(run, weights, torch.device("cpu")), graph, cache=True)
        return
    from onnxruntime.quantization import QuantType, quantize_dynamic

    whole = graph.with_name("whole.onnx")
    write_graph(load(run, "fp32", torch.device("cpu")), whole, cache=True)
    quantize_dynamic(whole, graph, weight_type=QuantType.QInt8)


def onnx_runtime(config: ModelConfig, weights: str, graph: Path) -> Engine:
    """ONNX Runtime on the CPU.

    Raises:
        NoKernel: it does not run this type.
    """
    session = OnnxSession(graph, config, cache=True)
    return Graph(session, lambda: _empty(config, DTYPES[weights], "cpu"))


def tensorrt(config: ModelConfig, weights: str, graph: Path) -> Engine:
    """An engine that is built here and now."""
    path = graph.with_suffix(".engine")
    shapes = tensorrt_engine.profile(config, cache=True)
    tensorrt_engine.build_engine(graph, path, shapes)
    dtype = DTYPES[weights]
    session = tensorrt_engine.EngineSession(path, config, dtype=dtype, cache=True)
    return Graph(session, lambda: _empty(config, dtype, "cuda"))


def _empty(config: ModelConfig, dtype: torch.dtype, device: str) -> list[LayerCache]:
    shape = (1, config.kv_head_count, 0, config.head_size)
    return [(torch.zeros(shape, dtype=dtype, device=device),) * 2 for _ in range(config.layers)]
