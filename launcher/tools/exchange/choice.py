"""Options of `shardscale export`."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from launcher.util.errors import UserError
from launcher.util.flags import as_flags

GRAPH_FORMATS = ("onnx", "tensorrt")
_FORMATS_OF: Mapping[str, tuple[str, ...]] = {
    "cache": GRAPH_FORMATS,
    "shard_size": ("hf",),
    "tokenizer": ("hf", *GRAPH_FORMATS),
}
"""Options and the formats that they apply to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """Write a checkpoint's weights for other programs."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder (its newest checkpoint is used), or one checkpoint."""
    out: Path
    """Output folder; must not exist yet."""
    format: Literal["hf", "safetensors", "onnx", "tensorrt"] = "hf"
    """hf: a folder for transformers' from_pretrained. safetensors: weights under shardscale's
    names. onnx: a graph for ONNX Runtime and others. tensorrt: an engine for this machine's GPU."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """dtype of the exported weights. auto: whole models for hf and safetensors take that of the
    weights that the run was fine-tuned from; otherwise fp32, as checkpoints are."""
    cache: bool = True
    """onnx, tensorrt: with a KV cache as inputs and outputs, for decoding token by token; without,
    the graph computes logits of whole sequences."""
    shard_size: str = "5GB"
    """hf: largest size of one weight file (5GB, 500MiB)."""
    adapter: bool = False
    """Export only the adapters of a run with --lora-rank, for PEFT."""
    merge: bool = False
    """Merge the adapters of a run into its base weights."""
    tokenizer: str | None = None
    """hf, onnx, tensorrt: a tokenizer.json, byte or hf:NAME instead of the run's own; none exports
    no tokenizer."""


def check_options(options: ExportOptions, given: Collection[str]) -> None:
    """Refuse options without effect on the chosen format.

    Args:
        given: names of the options on the command line.

    Raises:
        UserError: names the first such option.
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
