"""`shardscale export --format onnx|tensorrt`, which launcher/tools/exchange/export_cli.py calls."""

from pathlib import Path

import torch

from launcher.checkpoint import Checkpoint
from launcher.checkpoint.pretrained.loading import build
from launcher.checkpoint.pretrained.stored import Merged, Stored
from launcher.config.families import family_for
from launcher.tools.exchange.export import (
    DTYPES,
    ExportOptions,
    write_settings,
)
from launcher.tools.serve import engine
from launcher.util.errors import UserError
from launcher.util.files import sync
from launcher.util.packages import how_to_install, version_of
from launcher.util.sizes import gib

GRAPH_FILE, ENGINE_FILE = "model.onnx", "model.engine"
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def write_onnx(
    folder: Path, stored: Stored | Merged, checkpoint: Checkpoint, options: ExportOptions
) -> str:
    """A graph, held against PyTorch, and what belongs to the model beside it; what to say of it.

    Raises:
        UserError: packages are missing, a value is too large for fp16, or the graph computes
            something else.
    """
    if missing := missing_packages():
        names = ", ".join(missing)
        raise UserError(f"--format {options.format} needs {names}: {how_to_install('onnx')}")
    from launcher.tools.serve.check import check_graph
    from launcher.tools.serve.graph import write_graph

    try:
        family = family_for(stored.config)[0]
    except UserError:  # a graph needs none
        family = None
    said = write_settings(folder, checkpoint, stored.config, family, options)
    model = build(stored, device=torch.device("cpu"), dtype=DTYPES[options.dtype])
    for name, parameter in model.named_parameters():
        if parameter.isinf().any():
            most = torch.finfo(parameter.dtype).max
            raise UserError(f"--dtype fp16: {name} has values beyond {most:g}; use bf16")
    path = folder / GRAPH_FILE
    write_graph(model, path, cache=options.cache)
    checked = check_graph(path, model, cache=options.cache)
    files = sorted(folder.glob(f"{GRAPH_FILE}*"))
    for file in files:
        sync(file)
    kind = "with a cache" if options.cache else "of whole sequences"
    size = gib(sum(file.stat().st_size for file in files))
    without = "" if family else ", no config.json (transformers has no such model)"
    return f"{GRAPH_FILE} {kind} ({size}), {said}{without}; {checked}"


def write_tensorrt(
    folder: Path, stored: Stored | Merged, checkpoint: Checkpoint, options: ExportOptions
) -> str:
    """The same, and the engine that TensorRT builds of it for this machine's GPU.

    Raises:
        UserError: there is no TensorRT or no GPU, or it builds none.
    """
    shapes = engine.profile(stored.config, cache=options.cache)
    if missing := engine.missing():
        print(engine.trtexec(shapes, GRAPH_FILE, ENGINE_FILE))
        raise UserError(
            f"--format tensorrt needs {' and '.join(missing)}, which this machine has not: write "
            "--format onnx here, and build the engine where there is both with the trtexec line "
            f"above, or {how_to_install('tensorrt')} there and give this again"
        )
    said = write_onnx(folder, stored, checkpoint, options)
    from launcher.tools.serve.check import hold

    dtype, path = DTYPES[options.dtype], folder / ENGINE_FILE
    engine.build_engine(folder / GRAPH_FILE, path, shapes)
    model = build(stored, device=torch.device("cuda"), dtype=dtype)
    session = engine.EngineSession(path, model.config, dtype=dtype, cache=options.cache)
    checked = hold(session, model, cache=options.cache)
    sync(path)
    return f"{said}; {ENGINE_FILE} {checked}"


def missing_packages() -> list[str]:
    """Of those that write a graph and run it, what is not installed."""
    return [name for name in _PACKAGES if version_of(name) is None]
