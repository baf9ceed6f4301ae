"""TensorRT: what it needs, the sizes that an engine is built for, and building and running one.

Its parser knows operator sets 9 to 20 in TensorRT 10 (docs/operators.md of onnx/onnx-tensorrt,
release 10.1), and the graph keeps to that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from launcher.model.config import ModelConfig
from launcher.tools.serve.graph import input_names, output_names, past_names
from launcher.tools.serve.runtime import Runtime
from launcher.util.errors import UserError
from launcher.util.packages import version_of

MOST_BATCH = 8
"""Sequences that an engine takes at a time."""


class Shapes(NamedTuple):
    """Of an input: the smallest, what kernels are chosen for, the largest."""

    least: tuple[int, ...]
    usual: tuple[int, ...]
    most: tuple[int, ...]


Profile = Mapping[str, Shapes]
"""By the name of the input."""


def missing() -> list[str]:
    """What there is not on this machine and an engine needs."""
    found = [] if version_of("tensorrt") else ["tensorrt"]
    return found + ([] if torch.cuda.is_available() else ["a GPU"])


def profile(config: ModelConfig, *, cache: bool) -> Profile:
    """Batches up to `MOST_BATCH`, sequences up to the context.

    With a cache as much again may lie before a sequence, since each of the three must be sizes that
    go together; it is one token after the other that kernels are chosen for.
    """
    context = config.context
    if not cache:
        return {"input_ids": Shapes((1, 1), (1, context), (MOST_BATCH, context))}
    half = context // 2
    lengths = Shapes((1, 1), (1, 1), (MOST_BATCH, context))
    shapes = {
        "input_ids": lengths,
        "attention_mask": Shapes((1, 1), (1, half + 1), (MOST_BATCH, 2 * context)),
        "position_ids": lengths,
    }
    heads, width = config.kv_head_count, config.head_size
    held = Shapes(
        (1, heads, 0, width), (1, heads, half, width), (MOST_BATCH, heads, context, width)
    )
    return shapes | dict.fromkeys(past_names(config, "past_key_values"), held)


def trtexec(shapes: Profile, graph: str, engine: str) -> str:
    """The command line that builds the same engine elsewhere."""
    words = ["trtexec", f"--onnx={graph}", f"--saveEngine={engine}", "--stronglyTyped", "--noTF32"]
    for flag, of in (("min", "least"), ("opt", "usual"), ("max", "most")):
        listed = (f"{name}:{_by_x(getattr(each, of))}" for name, each in shapes.items())
        words.append(f"--{flag}Shapes={','.join(listed)}")
    return " ".join(words)


def _by_x(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def build_engine(graph: Path, path: Path, shapes: Profile) -> None:
    """Build and write an engine for this machine's GPU.

    Raises:
        UserError: TensorRT cannot parse the graph or build it.
    """
    import tensorrt as trt

    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(typed)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(graph)):
        raise UserError(
            f"TensorRT {trt.__version__} cannot parse the graph ({parser.get_error(0).desc()}): "
            "use another version, or --format onnx"
        )
    settings = builder.create_builder_config()
    settings.clear_flag(trt.BuilderFlag.TF32)  # fp32 means fp32
    sizes = builder.create_optimization_profile()
    for name, shape in shapes.items():
        sizes.set_shape(name, *shape)
    settings.add_optimization_profile(sizes)
    built = builder.build_serialized_network(network, settings)
    if built is None:
        raise UserError(
            f"TensorRT {trt.__version__} cannot build an engine of the graph for this GPU: use "
            "another version, or --format onnx"
        )
    path.write_bytes(built)


class EngineSession(Runtime):
    """An engine on torch's tensors.

    Raises:
        UserError: TensorRT does not load the engine, or does not run it.
    """

    def __init__(self, path: Path, config: ModelConfig, *, dtype: torch.dtype, cache: bool) -> None:
        import tensorrt as trt

        runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
        self._engine = runtime.deserialize_cuda_engine(path.read_bytes())
        _demand(self._engine is not None, f"load {path.name}")
        self._context = self._engine.create_execution_context()
        _demand(self._context is not None, f"reserve the memory that {path.name} runs in")
        self._dtype = dtype
        self._inputs = input_names(config, cache=cache)
        self._outputs = output_names(config, cache=cache)

    def run(self, values: Sequence[Tensor]) -> list[Tensor]:
        stream = torch.cuda.current_stream()
        # Kept until the engine has run.
        inputs = {
            name: value.cuda().contiguous()
            for name, value in zip(self._inputs, values, strict=True)
        }
        found = execute(self._context, inputs, self._outputs, self._dtype, stream.cuda_stream)
        stream.synchronize()
        return found


def execute(
    context: Any,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[str],
    dtype: torch.dtype,
    stream: int,
) -> list[Tensor]:
    """Queue an engine on a CUDA stream; its outputs, in order, which are there once it has run.

    `context` is a `tensorrt.IExecutionContext`, which says with False what it does not do: the
    outputs would then be memory that nobody has written.

    Raises:
        UserError: TensorRT refuses a shape, an address or the execution.
    """
    kept = []
    for name, value in inputs.items():
        shape = tuple(value.shape)
        _demand(context.set_input_shape(name, shape), f"take {name} of shape {list(shape)}")
        # An empty tensor has no address, and TensorRT asks for one.
        kept.append(value if value.numel() else value.new_empty(1))
        _demand(context.set_tensor_address(name, kept[-1].data_ptr()), f"read {name}")
    found = []
    for name in outputs:
        shape = tuple(context.get_tensor_shape(name))
        found.append(torch.empty(shape, dtype=dtype, device=kept[0].device))
        _demand(context.set_tensor_address(name, found[-1].data_ptr()), f"write {name}")
    _demand(context.execute_async_v3(stream), "run the engine")
    return found


def _demand(done: bool, what: str) -> None:
    if not done:
        raise UserError(
            f"TensorRT cannot {what}: its own lines above say why; use smaller sizes, another "
            "version of TensorRT, or --format onnx"
        )
