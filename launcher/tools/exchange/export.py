"""The weights of a checkpoint as safetensors, for transformers or bare."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from torch import Tensor

from launcher.checkpoint import Checkpoint, CheckpointFolder, DamagedCheckpoint
from launcher.checkpoint.pretrained.companions import (
    GENERATION_FILE,
    choose_tokenizer,
    ends_of,
    generation_config,
    run_of,
    write_tokenizer,
)
from launcher.checkpoint.pretrained.files import new_folder, write_json, write_weights
from launcher.checkpoint.pretrained.peft import write_adapter
from launcher.checkpoint.pretrained.stored import Merged, Stored, open_stored
from launcher.config.families import Family, family_for
from launcher.config.init_from import HF_CONFIG
from launcher.config.resolve import check_run_folder
from launcher.model.config import ModelConfig
from launcher.strategies.parameters import parameter_shapes
from launcher.util.errors import UserError
from launcher.util.flags import as_flags
from launcher.util.sizes import MOST_BYTES, parse_bytes

_FORMATS_OF: Mapping[str, tuple[str, ...]] = {
    "cache": ("onnx", "tensorrt"),
    "shard_size": ("hf",),
    "tokenizer": ("hf", "onnx", "tensorrt"),
}
"""Options -> the formats that they change."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_STEP = b'{"kind": "step", '


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """Write a checkpoint's weights for other programs."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder (its newest checkpoint is taken), or one checkpoint."""
    out: Path
    """Folder to write; must not exist yet."""
    format: Literal["hf", "safetensors", "onnx", "tensorrt"] = "hf"
    """hf: a folder for transformers' from_pretrained. safetensors: the weights under our names.
    onnx: a graph for ONNX Runtime and others. tensorrt: an engine for this machine's GPU."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of the weights; checkpoints are fp32."""
    cache: bool = True
    """onnx, tensorrt: keys and values are inputs and outputs, for one token after the other;
    without, the graph gives the logits of whole sequences."""
    shard_size: str = "5GB"
    """hf: the most bytes in one file of weights (5GB, 500MiB)."""
    adapter: bool = False
    """Only the adapters of a run with --lora-rank, for PEFT."""
    merge: bool = False
    """The weights with the products of a run's adapters added to them."""
    tokenizer: str | None = None
    """hf, onnx, tensorrt: a tokenizer.json, byte or hf:NAME in place of the run's own; none leaves
    it out."""


Write = Callable[[Path, Stored | Merged, Checkpoint, ExportOptions], str]
"""Fills an empty folder; what to say of it."""


def export(options: ExportOptions, write: Write) -> str:
    """Write the folder; the line that says what is in it.

    Raises:
        UserError: nothing to export, damaged, or not expressible in the format.
    """
    check_run_folder(options.out)
    while True:
        with open_stored(options.run) as stored:
            try:
                return _export(_chosen(stored, options), options, write)
            except DamagedCheckpoint:
                # A run that is alive saves a newer one and removes this one, with --keep.
                path = None if stored.checkpoint is None else stored.checkpoint.path
                if path is None or path == options.run or path.exists():
                    raise


def check_options(options: ExportOptions, given: Collection[str]) -> None:
    """Refuse options without effect.

    Args:
        given: names of the options that the command line has.

    Raises:
        UserError: naming the first of them.
    """
    for name, formats in _FORMATS_OF.items():
        flags = as_flags({name: getattr(options, name)})
        if name not in given:
            continue
        if options.format not in formats:
            raise UserError(
                f"{flags} belongs to --format {' or '.join(formats)}, not {options.format}: leave "
                "it out"
            )
        if options.adapter and options.format == "hf":
            raise UserError(f"{flags} changes nothing of an --adapter: leave it out")


def _chosen(stored: Stored, options: ExportOptions) -> Stored | Merged:
    """What the flags ask for of a run.

    Raises:
        UserError: it is none, or they do not fit it.
    """
    flag = "--adapter" if options.adapter else "--merge"
    if stored.checkpoint is None:
        raise UserError(
            f"{options.run}: is no run of shardscale: give a run folder or a checkpoint"
        )
    if options.adapter and options.merge:
        raise UserError("--adapter writes adapters alone, --merge none: give one of them")
    if stored.config.lora is None:
        if options.adapter or options.merge:
            raise UserError(f"{flag}: {options.run} has no adapters: leave it out")
        return stored
    if not options.adapter and not options.merge:
        raise UserError(
            f"{options.run}: has adapters beside weights that it does not hold: give --merge for "
            "whole weights, or --adapter for the adapters alone"
        )
    if options.adapter and options.format != "hf":
        raise UserError(
            f"--adapter is PEFT's format, not --format {options.format}: leave that out"
        )
    return stored if options.adapter else Merged(stored)


def _export(model: Stored | Merged, options: ExportOptions, write: Write) -> str:
    checkpoint = model.checkpoint
    assert checkpoint is not None
    with new_folder(options.out) as folder:
        said = write(folder, model, checkpoint, options)
    config = model.config
    count = config.trained_parameter_count if options.adapter else config.parameter_count
    return (
        f"exported {checkpoint.path} to {options.out}: {_which_step(checkpoint)}; "
        f"{count:,} parameters, {options.dtype}, {said}"
    )


def write_weights_alone(
    folder: Path, model: Stored | Merged, checkpoint: Checkpoint, options: ExportOptions
) -> str:
    """The formats that are weights: all of them, or those of adapters."""
    if not options.adapter:
        return _write_whole(folder, model, checkpoint, options)
    base = checkpoint.extra.get("base")
    path = None if base is None else base.path
    return write_adapter(folder, model.config, model.read, base=path, dtype=DTYPES[options.dtype])


def _write_whole(
    folder: Path, model: Stored | Merged, checkpoint: Checkpoint, options: ExportOptions
) -> str:
    """Write all weights; what to say of the files."""
    config = model.config
    most_bytes = parse_bytes(options.shard_size, "--shard-size")
    own = parameter_shapes(config)
    metadata = {"format": "pt"}
    if options.format == "hf":
        family, theirs = family_for(config)
        said = f"{family.architecture} for transformers, "
        said += write_settings(folder, checkpoint, config, family, options)
        parts = {part.theirs: part for part in family.parts(theirs, parameter_shapes(theirs))}
        shapes = {name: part.their_shape for name, part in parts.items()}
    else:
        said = "our names"
        parts, shapes, most_bytes = {}, dict(own), MOST_BYTES
        described = json.dumps(dataclasses.asdict(config))
        metadata |= {"step": str(checkpoint.step), "model": described}

    whole = functools.lru_cache(maxsize=1)(model.read)  # its parts follow each other

    def read(name: str) -> Tensor:
        part = parts.get(name)
        if part is None:
            return model.read(name)
        if part.ours not in own:  # a bias that our model was built without
            return torch.zeros(part.their_shape)
        begin = part.start // math.prod(part.shape[1:])
        return part.turned(whole(part.ours)[begin : begin + part.shape[0]])

    files = write_weights(
        folder,
        shapes,
        read,
        dtype=DTYPES[options.dtype],
        metadata=metadata,
        most_bytes=most_bytes,
    )
    return f"{'1 file' if files == 1 else f'{files} files'}, {said}"


def write_settings(
    folder: Path,
    checkpoint: Checkpoint,
    config: ModelConfig,
    family: Family | None,
    options: ExportOptions,
) -> str:
    """All that transformers reads beside the weights, a config.json where a family has the model;
    what to say of the tokenizer.

    Raises:
        UserError: there is no such tokenizer, or it is not the model's.
    """
    tokenizer = choose_tokenizer(checkpoint, options.tokenizer)
    end_of_text = write_tokenizer(folder, tokenizer, config) if tokenizer else None
    places = [folder]
    if options.tokenizer in (None, "none"):  # another one has other tokens that end a text
        places.append(run_of(checkpoint))
    generation = generation_config(places, end_of_text, config.vocab_size)
    write_json(folder / GENERATION_FILE, generation)
    stored_as = {"torch_dtype": str(DTYPES[options.dtype]).removeprefix("torch.")}
    if family is not None:
        written = {**family.write(config), **ends_of(generation), **stored_as}
        write_json(folder / HF_CONFIG, written)
    return f"tokenizer {tokenizer}" if tokenizer else "no tokenizer"


def _which_step(checkpoint: Checkpoint) -> str:
    """The step that a checkpoint holds, and whether it is the last of its run."""
    step = checkpoint.step
    of_all = checkpoint.extra.get("steps")
    if of_all is None:
        return f"step {step}"
    said = f"step {step} of {of_all}"
    newest = CheckpointFolder(checkpoint.path.parent).latest()
    recorded = _last_recorded(checkpoint.path.absolute().parents[1])
    if newest is not None and newest.name > checkpoint.path.name:
        return f"{said}, not the last that is saved: {newest.name} is"
    if recorded > step:
        return f"{said}, not the run's last: it went on to step {recorded}, which is not saved"
    if step < of_all:
        return f"{said}, not the last: the run has not got there"
    return said


def _last_recorded(run: Path) -> int:
    """The last step in the run's records; 0 where there are none."""
    last = b""
    try:
        with (run / "rank0.jsonl").open("rb") as file:
            for line in file:
                last = line if line.startswith(_STEP) and line.endswith(b"\n") else last
        return int(json.loads(last)["step"]) if last else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0
