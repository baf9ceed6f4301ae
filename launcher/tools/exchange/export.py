"""`shardscale export`: a checkpoint for transformers, as safetensors, for ONNX or TensorRT."""

import dataclasses
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from launcher.checkpoint import Checkpoint, DamagedCheckpoint
from launcher.checkpoint.pretrained.adapters import BASE_FIELD, write_adapter
from launcher.checkpoint.pretrained.companions import (
    GENERATION_FILE,
    choose_tokenizer,
    ends_of,
    generation_config,
    with_turn_ends,
    write_tokenizer,
)
from launcher.checkpoint.pretrained.folder_weights import Stored
from launcher.checkpoint.pretrained.stored import dtype_of_base, open_stored
from launcher.checkpoint.pretrained.transformed import Merged
from launcher.checkpoint.pretrained.weight_files import new_folder, write_json, write_weights
from launcher.config.init_from import ADAPTER_CONFIG, HF_CONFIG
from launcher.config.resolve import check_run_folder
from launcher.config.transformers_config import require_own, require_transformers
from launcher.model.config import ModelConfig
from launcher.optim.dtypes import torch_dtype
from launcher.strategies.parameters import parameter_shapes
from launcher.tools.exchange.choice import GRAPH_FORMATS, ExportOptions
from launcher.tools.exchange.layouts import layout_of
from launcher.tools.exchange.provenance import which_step
from launcher.util.errors import UserError
from launcher.util.sizes import MOST_BYTES, parse_bytes

_NAMES: Final[Mapping[str, Literal["bf16", "fp16"]]] = {"bfloat16": "bf16", "float16": "fp16"}
"""Name in config.json -> ours."""


def export(options: ExportOptions) -> str:
    """Write the folder; returns a line that describes it.

    Raises:
        UserError: nothing to export, damaged, or not expressible in the format.
    """
    check_run_folder(options.out)
    while True:
        with open_stored(options.run) as stored:
            require_transformers(stored.config, f"{options.run}: shardscale export")
            if options.format in GRAPH_FORMATS:
                require_own(stored.config, f"--format {options.format}")
            try:
                return _export(_chosen(stored, options), options)
            except DamagedCheckpoint:
                # A live run with --keep may have removed this one after saving a newer one.
                path = None if stored.checkpoint is None else stored.checkpoint.path
                if path is None or path == options.run or path.exists():
                    raise


def _chosen(stored: Stored, options: ExportOptions) -> Stored | Merged:
    """Choose between a run's weights, its adapters and the merged weights.

    Raises:
        UserError: not a run, or the flags do not apply to it.
    """
    flag = "--adapter" if options.adapter else "--merge"
    if stored.checkpoint is None:
        raise UserError(f"{options.run} is not a shardscale run: give a run folder or a checkpoint")
    if options.adapter and options.merge:
        raise UserError("--adapter exports adapters alone and --merge none: give one of them")
    if stored.config.lora is None:
        if options.adapter or options.merge:
            raise UserError(f"{flag}: {options.run} has no adapters: leave it out")
        return stored
    if not options.adapter and not options.merge:
        raise UserError(
            f"{options.run} holds adapters and not their base weights: give --merge for merged "
            "weights, or --adapter for the adapters alone"
        )
    if options.adapter and options.format != "hf":
        raise UserError(
            f"--adapter is PEFT's format, not --format {options.format}: leave that out"
        )
    return stored if options.adapter else Merged(stored)


def _export(model: Stored | Merged, options: ExportOptions) -> str:
    checkpoint = model.checkpoint
    assert checkpoint is not None
    if options.dtype == "auto":
        # Adapters are trained in fp32 beside a base of any dtype, and PEFT keeps theirs so.
        exact = options.adapter or options.format in GRAPH_FORMATS
        began = None if exact else dtype_of_base(checkpoint)
        options = dataclasses.replace(options, dtype=_NAMES.get(str(began), "fp32"))
    with new_folder(options.out) as folder:
        if options.format in GRAPH_FORMATS:
            description = _write_graph(folder, model, checkpoint, options)
        elif options.adapter:
            base = checkpoint.extra.get("base")
            path = None if base is None else base.path
            dtype = torch_dtype(options.dtype)
            description = write_adapter(folder, model.config, model.read, base=path, dtype=dtype)
        else:
            description = _write_weights(folder, model, checkpoint, options)
    config = model.config
    count = config.trained_parameter_count if options.adapter else config.parameter_count
    line = (
        f"exported {checkpoint.path} to {options.out}: {which_step(checkpoint)}; "
        f"{count:,} parameters, {options.dtype}, {description}"
    )
    return "\n".join([line, *_adapter_notes(model, options)])


def _adapter_notes(model: Stored | Merged, options: ExportOptions) -> list[str]:
    """Return what PEFT does not know of the base of an adapter."""
    if not options.adapter:
        return []
    notes, kind = [], model.config.quantize_base
    if kind != "none":
        notes.append(
            f"they were trained beside weights in {kind}, and PEFT puts them beside the base as it "
            "is on disk, which computes something else: --merge exports the weights as trained"
        )
    assert model.checkpoint is not None
    base = model.checkpoint.extra.get("base")
    if base is None or base.path is None or (Path(base.path) / HF_CONFIG).is_file():
        return notes
    return [
        *notes,
        f"its base {base.path} is a run's checkpoint, which PEFT cannot load: shardscale export "
        f"{shlex.quote(base.path)} --out FOLDER, and write FOLDER as {BASE_FIELD} in "
        f"{options.out / ADAPTER_CONFIG}",
    ]


def _write_graph(
    folder: Path, model: Stored | Merged, checkpoint: Checkpoint, options: ExportOptions
) -> str:
    # Graphs and engines are another tool's, which an installation may leave out.
    try:
        from launcher.tools.serve import export as graphs
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("launcher.tools.serve"):
            raise
        raise UserError(
            f"--format {options.format} needs launcher.tools.serve, which is not in this "
            "installation: reinstall shardscale, or use --format hf"
        ) from None

    def settings() -> str:
        try:
            document = layout_of(model).document
        except UserError:  # a graph needs none
            return (
                f"{write_settings(folder, checkpoint, model.config, None, options)}, no "
                "config.json (transformers has no such model)"
            )
        return write_settings(folder, checkpoint, model.config, document, options)

    write = graphs.write_onnx if options.format == "onnx" else graphs.write_tensorrt
    return write(folder, model, options.dtype, cache=options.cache, write_settings=settings)


def _write_weights(
    folder: Path, model: Stored | Merged, checkpoint: Checkpoint, options: ExportOptions
) -> str:
    """Write all weights; returns a phrase about the files."""
    config = model.config
    most_bytes = parse_bytes(options.shard_size, "--shard-size")
    shapes: Mapping[str, tuple[int, ...]]
    metadata = {"format": "pt"}
    if options.format == "hf":
        architecture, document, shapes, read = layout_of(model)
        settings = write_settings(folder, checkpoint, config, document, options)
        description = f"{architecture} for transformers, {settings}"
    else:
        description = "our names"
        shapes, read, most_bytes = parameter_shapes(config), model.read, MOST_BYTES
        described = json.dumps(dataclasses.asdict(config))
        metadata |= {"step": str(checkpoint.step), "model": described}

    files = write_weights(
        folder,
        shapes,
        read,
        dtype=torch_dtype(options.dtype),
        metadata=metadata,
        most_bytes=most_bytes,
    )
    return f"{'1 file' if files == 1 else f'{files} files'}, {description}"


def write_settings(
    folder: Path,
    checkpoint: Checkpoint,
    config: ModelConfig,
    document: Mapping[str, Any] | None,
    options: ExportOptions,
) -> str:
    """Write what transformers reads beside the weights; returns a phrase about the tokenizer.

    Args:
        document: config.json without the fields that are chosen here; None writes none.

    Raises:
        UserError: no such tokenizer, or not one of this model.
    """
    tokenizer = choose_tokenizer(checkpoint, options.tokenizer)
    end_of_text = write_tokenizer(folder, tokenizer, config) if tokenizer else None
    places = [folder]
    if options.tokenizer in (None, "none"):  # another tokenizer has other end-of-text tokens
        places.append(checkpoint.run_folder)
    known = generation_config(places, end_of_text, config.vocab_size)
    generation = with_turn_ends(known, folder, config.vocab_size)
    write_json(folder / GENERATION_FILE, generation)
    if document is not None:
        # transformers 5 reads dtype first, earlier versions read torch_dtype.
        dtype = str(torch_dtype(options.dtype)).removeprefix("torch.")
        name = "dtype" if "dtype" in document else "torch_dtype"
        written = {**document, **ends_of(generation), name: dtype}
        write_json(folder / HF_CONFIG, written)
    return f"tokenizer {tokenizer}" if tokenizer else "no tokenizer"
