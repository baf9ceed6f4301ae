"""The decoder that a trainer computes: transformers' own code, where that is installed.

Shardscale's decoder has the same shape and fewer operators: its norms are one kernel, its rotary
embedding another. What a trainer keeps of a block is what transformers' code keeps, so that code is
traced.
"""

import dataclasses
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from launcher.config.families import family_for
from launcher.config.schema import RunConfig
from launcher.config.transformers_config import names_config
from launcher.model.config import ModelConfig
from launcher.util.errors import UserError

_SHAPE: Final = tuple(
    field.name
    for field in dataclasses.fields(ModelConfig)
    if field.name not in ("attention", "activation_checkpointing", "loss_chunk", "quantize_base")
)
_KNOWN: Final = ("none", "full")
"""Ways to recompute that transformers' blocks have."""
_ATTENTION: Final = {"auto": "sdpa", "sdpa": "sdpa", "flash": "sdpa", "eager": "eager"}
"""Ours -> transformers'; flash_attn's functions keep what sdpa's kernel keeps."""


def computed_by_transformers(
    config: RunConfig, folder: Path, marks: Sequence[str], layers: str | None
) -> RunConfig | None:
    """Return the same run with transformers' decoder, or None where it has none.

    Args:
        folder: takes the decoder's config.json.
        marks: fields of the document that say what else its trainer does.
        layers: its own names of those with adapters; None for the same words as in `config`.
    """
    model, sharding = config.model, config.sharding
    if find_spec("transformers") is None or config.loop.compiles or names_config(model.model):
        return None
    if sharding.context_parallel > 1:
        return None
    if model.activation_checkpointing not in _KNOWN or model.attention not in _ATTENTION:
        return None
    built = model.build()
    length = config.data.seq_len or built.context
    if model.attention == "flash" and built.window is not None and length > built.window:
        return None  # of a window sdpa makes a mask and repeats heads, flash_attn does neither
    try:
        family, theirs = family_for(built)
    except UserError:
        return None
    document = family.write(theirs) | dict.fromkeys(marks, True)
    place = folder / model.label
    place.mkdir(exist_ok=True)
    path = place / "config.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return config.replace(
        **dict.fromkeys(name for name in _SHAPE if hasattr(model, name)),
        model=str(path),
        decoder="transformers",
        attention=_ATTENTION[model.attention],
        lora_targets=layers or model.lora_targets,
    )
