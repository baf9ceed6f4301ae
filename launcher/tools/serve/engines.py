"""Engines that `infer-bench` compares: eager and compiled PyTorch, ONNX Runtime, TensorRT."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from launcher.checkpoint.pretrained.loading import build, open_source
from launcher.model.config import ModelConfig
from launcher.model.decode import Cache
from launcher.model.gpt import GPT
from launcher.tools.serve import tensorrt as tensorrt_engine
from launcher.tools.serve.graph import CachedDecoder, empty_cache, write_graph
from launcher.tools.serve.runtime import GraphSession, onnx_session

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.float32}
"""dtype of the loaded weights; int8 quantizes the projections afterwards."""


@dataclass(frozen=True, slots=True)
class InferenceEngine:
    """A loaded model that decodes one sequence at a time."""

    begin: Callable[[int], Callable[[Tensor], Tensor]]
    """Start a sequence of at most n tokens: returns a function from the next tokens [T], int64 on
    the CPU, to the logits [V] after the last of them."""
    logits: Callable[[Tensor], Tensor]
    """Logits [T, V] of a whole sequence [T]."""


def eager(model: GPT) -> InferenceEngine:
    """PyTorch, as `shardscale generate` runs it."""
    device = model.device

    def begin(capacity: int) -> Callable[[Tensor], Tensor]:
        cache = Cache(model, capacity)
        return lambda tokens: cache.extend(tokens.to(device))

    return InferenceEngine(begin, lambda tokens: model(tokens[None].to(device))[0])


def compiled(model: GPT) -> InferenceEngine:
    """Compile a decoding step with its cache, with dynamic shapes."""
    decoder = torch.compile(CachedDecoder(model), dynamic=True)

    def run(values: Sequence[Tensor]) -> list[Tensor]:
        tokens, mask, positions, *held = values
        past = list(zip(held[::2], held[1::2], strict=True))
        logits, present = decoder(tokens, mask, positions, past)
        return [logits, *(part for layer in present for part in layer)]

    return _of_session(GraphSession(run), model.config, model.dtype, model.device.type)


def onnx_runtime(config: ModelConfig, weights: str, graph: Path) -> InferenceEngine:
    """Run the graph in ONNX Runtime on the CPU.

    Raises:
        NoKernel: ONNX Runtime does not support the dtype.
    """
    return _of_session(onnx_session(graph, config, cache=True), config, DTYPES[weights], "cpu")


def tensorrt(config: ModelConfig, weights: str, graph: Path) -> InferenceEngine:
    """Build a TensorRT engine of the graph for this GPU and load it."""
    path, dtype = graph.with_suffix(".engine"), DTYPES[weights]
    tensorrt_engine.build_engine(graph, path, tensorrt_engine.profile(config, cache=True))
    session = tensorrt_engine.engine_session(path, config, dtype=dtype, cache=True)
    return _of_session(session, config, dtype, "cuda")


def _of_session(
    session: GraphSession, config: ModelConfig, dtype: torch.dtype, device: str
) -> InferenceEngine:
    # Distinct tensors: torch.compile specialises on aliased inputs.
    empty = partial(empty_cache, config, 1, 0, dtype, torch.device(device))

    def begin(capacity: int) -> Callable[[Tensor], Tensor]:
        past = empty()

        def extend(tokens: Tensor) -> Tensor:
            nonlocal past
            logits, past = session.extend(tokens[None].to(device), past)
            return logits[0, -1]

        return extend

    return InferenceEngine(
        begin, lambda tokens: session.extend(tokens[None].to(device), empty())[0][0]
    )


def load(run: Path, weights: str, device: torch.device) -> GPT:
    """Load the model into PyTorch, with int8 projections if requested."""
    with open_source(run) as source:
        model = build(source, device=device, dtype=DTYPES[weights])
    if weights == "int8":
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        logging.getLogger("torchao").setLevel(logging.ERROR)
        quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model


def prepare(run: Path, weights: str, graph: Path) -> None:
    """Write the graph of a run; int8 is quantized from the fp32 graph beside it, which is written
    first where it is missing."""
    if weights != "int8":
        write_graph(load(run, weights, torch.device("cpu")), graph, cache=True)
        return
    from onnxruntime.quantization import QuantType, quantize_dynamic

    whole = graph.with_name("fp32.onnx")
    if not whole.exists():
        write_graph(load(run, "fp32", torch.device("cpu")), whole, cache=True)
    quantize_dynamic(whole, graph, weight_type=QuantType.QInt8)
