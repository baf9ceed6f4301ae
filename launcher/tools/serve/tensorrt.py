"""Build and run TensorRT engines: requirements, optimization profile, build, execution.

The parser knows operator sets 9 to 20 in TensorRT 10 (docs/operators.md of onnx/onnx-tensorrt,
release 10.1), and the graph stays within them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launcher.model.config import ModelConfig
from launcher.tools.serve.graph import input_names, output_names, past_names
from launcher.tools.serve.runtime import GraphSession
from launcher.util.errors import UserError
from launcher.util.packages import version_of

MOST_BATCH = 8
"""Largest batch of an engine."""


_KINDS = ("min", "opt", "max")
Profile = Mapping[str, tuple[tuple[int, ...], ...]]
"""Input name -> shapes of `_KINDS`: minimum, the one that kernels are tuned for, maximum."""


def missing() -> list[str]:
    """List what an engine needs and this machine lacks."""
    found = [] if version_of("tensorrt") else ["tensorrt"]
    return found + ([] if torch.cuda.is_available() else ["a GPU"])


def profile(config: ModelConfig, *, cache: bool) -> Profile:
    """Choose shapes: batches up to `MOST_BATCH`, sequences up to the context.

    With a cache, up to another context of tokens may precede a sequence, because the shapes of each
    set must be consistent; kernels are tuned for decoding one token.
    """
    context = config.context
    if not cache:
        return {"input_ids": ((1, 1), (1, context), (MOST_BATCH, context))}
    half = context // 2
    lengths = (1, 1), (1, 1), (MOST_BATCH, context)
    shapes = {
        "input_ids": lengths,
        "attention_mask": ((1, 1), (1, half + 1), (MOST_BATCH, 2 * context)),
        "position_ids": lengths,
    }
    heads, width = config.kv_head_count, config.head_size
    held = (1, heads, 0, width), (1, heads, half, width), (MOST_BATCH, heads, context, width)
    return shapes | dict.fromkeys(past_names(config, "past_key_values"), held)


def trtexec(shapes: Profile, graph: str, engine: str) -> str:
    """Return the command line that builds the same engine elsewhere."""
    words = ["trtexec", f"--onnx={graph}", f"--saveEngine={engine}", "--stronglyTyped", "--noTF32"]
    for number, kind in enumerate(_KINDS):
        listed = (f"{name}:{'x'.join(map(str, each[number]))}" for name, each in shapes.items())
        words.append(f"--{kind}Shapes={','.join(listed)}")
    return " ".join(words)


def build_engine(graph: Path, path: Path, shapes: Profile) -> None:
    """Build and write an engine for this machine's GPU.

    Raises:
        UserError: TensorRT cannot parse the graph or build it.
    """
    import tensorrt as trt

    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    # creation flags are bit numbers
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


def engine_session(
    path: Path, config: ModelConfig, *, dtype: torch.dtype, cache: bool
) -> GraphSession:
    """Load an engine; it runs on CUDA copies of its inputs.

    Raises:
        UserError: TensorRT does not load the engine, or (when run) does not run it.
    """
    import tensorrt as trt

    runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
    engine = runtime.deserialize_cuda_engine(path.read_bytes())
    _require(engine is not None, f"load {path.name}")
    context = engine.create_execution_context()
    _require(context is not None, f"reserve the memory that {path.name} runs in")
    names, outputs = input_names(config, cache=cache), output_names(config, cache=cache)

    def run(values: Sequence[Tensor]) -> list[Tensor]:
        stream = torch.cuda.current_stream()
        # Referenced until the engine has run.
        inputs = {n: v.cuda().contiguous() for n, v in zip(names, values, strict=True)}
        found = execute(context, inputs, outputs, dtype, stream.cuda_stream)
        stream.synchronize()
        return found

    return GraphSession(run)


def execute(
    context: Any,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[str],
    dtype: torch.dtype,
    stream: int,
) -> list[Tensor]:
    """Queue an engine on a CUDA stream; returns its outputs, valid once the stream has run.

    `context` is a `tensorrt.IExecutionContext`. It reports failure by returning False, and the
    outputs would then be uninitialised memory.

    Raises:
        UserError: TensorRT refuses a shape, an address or the execution.
    """
    kept = []
    for name, value in inputs.items():
        shape = tuple(value.shape)
        _require(context.set_input_shape(name, shape), f"take {name} of shape {list(shape)}")
        # An empty tensor has no address, but TensorRT requires one.
        kept.append(value if value.numel() else value.new_empty(1))
        _require(context.set_tensor_address(name, kept[-1].data_ptr()), f"read {name}")
    found = []
    for name in outputs:
        shape = tuple(context.get_tensor_shape(name))
        found.append(torch.empty(shape, dtype=dtype, device=kept[0].device))
        _require(context.set_tensor_address(name, found[-1].data_ptr()), f"write {name}")
    _require(context.execute_async_v3(stream), "run the engine")
    return found


def _require(done: bool, what: str) -> None:
    if not done:
        raise UserError(
            f"TensorRT cannot {what}: its messages above say why; use smaller sizes, another "
            "version of TensorRT, or --format onnx"
        )
