"""Write ONNX graphs and TensorRT engines; `shardscale export --format onnx|tensorrt` calls this."""

from collections.abc import Callable
from pathlib import Path

import torch

from launcher.checkpoint.pretrained.folder_weights import Stored
from launcher.checkpoint.pretrained.loading import build
from launcher.checkpoint.pretrained.transformed import Merged
from launcher.optim.dtypes import torch_dtype
from launcher.tools.serve import tensorrt
from launcher.util.errors import UserError
from launcher.util.files import sync
from launcher.util.packages import how_to_install, version_of
from launcher.util.sizes import gib

GRAPH_FILE, ENGINE_FILE = "model.onnx", "model.engine"
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")

WriteSettings = Callable[[], str]
"""Writes config, tokenizer and generation settings beside the graph; returns a phrase on them."""


def write_onnx(
    folder: Path, stored: Stored | Merged, dtype: str, *, cache: bool, write_settings: WriteSettings
) -> str:
    """Write a graph, checked against PyTorch, and its settings; returns a description.

    Raises:
        UserError: missing packages, a value too large for fp16, or a graph that computes
            something else.
    """
    if missing := missing_packages():
        raise UserError(f"--format onnx needs {', '.join(missing)}: {how_to_install('onnx')}")
    from launcher.tools.serve.check import check_graph
    from launcher.tools.serve.graph import write_graph

    settings = write_settings()
    model = build(stored, device=torch.device("cpu"), dtype=torch_dtype(dtype))
    for name, parameter in model.named_parameters():
        # the cast to fp16 makes inf of what is beyond its range
        if parameter.isinf().any():
            most = torch.finfo(parameter.dtype).max
            raise UserError(f"--dtype fp16: {name} has values beyond {most:g}; use bf16")
    path = folder / GRAPH_FILE
    write_graph(model, path, cache=cache)
    checked = check_graph(path, model, cache=cache)
    files = sorted(folder.glob(f"{GRAPH_FILE}*"))
    for file in files:
        sync(file)
    kind = "with a cache" if cache else "of whole sequences"
    size = gib(sum(file.stat().st_size for file in files))
    return f"{GRAPH_FILE} {kind} ({size}), {settings}; {checked}"


def write_tensorrt(
    folder: Path, stored: Stored | Merged, dtype: str, *, cache: bool, write_settings: WriteSettings
) -> str:
    """Write a graph and the TensorRT engine built from it for this machine's GPU.

    Raises:
        UserError: no TensorRT or no GPU, or TensorRT cannot build an engine.
    """
    shapes = tensorrt.profile(stored.config, cache=cache)
    if missing := tensorrt.missing():
        print(tensorrt.trtexec(shapes, GRAPH_FILE, ENGINE_FILE))
        raise UserError(
            f"--format tensorrt needs {' and '.join(missing)}, missing on this machine: write "
            "--format onnx here and build the engine on a GPU machine with the trtexec line "
            f"above, or {how_to_install('tensorrt')} there and repeat this command"
        )
    written = write_onnx(folder, stored, dtype, cache=cache, write_settings=write_settings)
    from launcher.tools.serve.check import check_session

    path = folder / ENGINE_FILE
    tensorrt.build_engine(folder / GRAPH_FILE, path, shapes)
    model = build(stored, device=torch.device("cuda"), dtype=torch_dtype(dtype))
    session = tensorrt.engine_session(path, model.config, dtype=torch_dtype(dtype), cache=cache)
    checked = check_session(session, model, cache=cache)
    sync(path)
    return f"{written}; {ENGINE_FILE} {checked}"


def missing_packages() -> list[str]:
    """List the packages that writing and running a graph needs and that are not installed."""
    return [name for name in _PACKAGES if version_of(name) is None]
