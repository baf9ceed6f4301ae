"""`shardscale export`: the weights of a checkpoint as safetensors, for transformers or bare."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from torch import Tensor

from launcher.checkpoint import Checkpoint, CheckpointFolder, DamagedCheckpoint
from launcher.checkpoint.weights import Weights, open_weights
from launcher.errors import ExitCode, refusing
from launcher.exchange.companions import (
    GENERATION_FILE,
    choose_tokenizer,
    ends_of,
    generation_config,
    run_of,
    write_tokenizer,
)
from launcher.exchange.files import new_folder, write_json, write_weights
from launcher.families import Family, family_for
from launcher.flags import one_sentence
from launcher.memory.parameters import parameter_shapes
from launcher.model.config import ModelConfig
from launcher.sizes import MOST_BYTES, parse_bytes

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_STEP = b'{"kind": "step", '


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """Write a checkpoint's weights for other programs."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder (its newest checkpoint is taken), or one checkpoint."""
    out: Path
    """Folder to write; must not exist yet."""
    format: Literal["hf", "safetensors"] = "hf"
    """hf: a folder for transformers' from_pretrained. safetensors: the weights under our names."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of the weights; checkpoints are fp32."""
    shard_size: str = "5GB"
    """hf: the most bytes in one file of weights (5GB, 500MiB)."""
    tokenizer: str | None = None
    """hf: a tokenizer.json, byte or hf:NAME in place of the run's own; none leaves it out."""


@refusing
def main(argv: Sequence[str]) -> int:
    """Export one checkpoint; 0 when it is there, 2 when refused."""
    with one_sentence():
        options = tyro.cli(ExportOptions, args=list(argv), prog="shardscale export")
    print(export(options))
    return ExitCode.DONE


def export(options: ExportOptions) -> str:
    """Write the folder; the line that says what is in it.

    Raises:
        UserError: nothing to export, damaged, or not expressible in the format.
    """
    while True:
        with open_weights(options.run) as weights:
            try:
                return _export(weights, options)
            except DamagedCheckpoint:
                # A run that is alive saves a newer one and removes this one, with --keep.
                path = weights.checkpoint.path
                if path == options.run or path.exists():
                    raise


def _export(weights: Weights, options: ExportOptions) -> str:
    checkpoint, config = weights.checkpoint, weights.config
    dtype = _DTYPES[options.dtype]
    most_bytes = parse_bytes(options.shard_size, "--shard-size")
    with new_folder(options.out) as folder:
        metadata = {"format": "pt"}
        if options.format == "hf":
            family, theirs = family_for(config)
            said = _write_settings(folder, checkpoint, config, family, options)
            parts = {part.theirs: part for part in family.parts(theirs, parameter_shapes(theirs))}
            shapes = {name: part.their_shape for name, part in parts.items()}
        else:
            said = "our names"
            parts, shapes, most_bytes = {}, dict(checkpoint.shapes), MOST_BYTES
            model = json.dumps(dataclasses.asdict(config))
            metadata |= {"step": str(checkpoint.step), "model": model}

        def read(name: str) -> Tensor:
            part = parts.get(name)
            if part is None:
                return weights.read(name)
            if part.ours not in checkpoint.shapes:  # a bias that our model was built without
                return torch.zeros(part.their_shape)
            return part.turned(weights.read_part(part.ours, part.start, part.shape))

        files = write_weights(
            folder, shapes, read, dtype=dtype, metadata=metadata, most_bytes=most_bytes
        )
    in_files = "1 file" if files == 1 else f"{files} files"
    return (
        f"exported {checkpoint.path} to {options.out}: {_which_step(checkpoint)}; "
        f"{config.parameter_count:,} parameters, {options.dtype}, {in_files}, {said}"
    )


def _write_settings(
    folder: Path,
    checkpoint: Checkpoint,
    config: ModelConfig,
    family: Family,
    options: ExportOptions,
) -> str:
    """All that transformers reads beside the weights."""
    tokenizer = choose_tokenizer(checkpoint, options.tokenizer)
    end_of_text = write_tokenizer(folder, tokenizer, config) if tokenizer else None
    places = [folder]
    if options.tokenizer in (None, "none"):  # another one has other tokens that end a text
        places.append(run_of(checkpoint))
    generation = generation_config(places, end_of_text)
    write_json(folder / GENERATION_FILE, generation)
    stored_as = {"torch_dtype": str(_DTYPES[options.dtype]).removeprefix("torch.")}
    write_json(folder / "config.json", {**family.write(config), **ends_of(generation), **stored_as})
    with_tokenizer = f"tokenizer {tokenizer}" if tokenizer else "no tokenizer"
    return f"{family.architecture} for transformers, {with_tokenizer}"


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
