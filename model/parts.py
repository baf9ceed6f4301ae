"""Parts of a decoder: embeddings, blocks, head, and the projections of a block.

Strategies, the trace, checkpoints, optimizers and tools ask here and spell no module's name.
`parts_of` finds them in any decoder whose blocks are one `nn.ModuleList`, and `block_of` reads the
names of all those; only `projections` describes our own block.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from torch import nn

from launcher.model.config import ModelConfig
from launcher.model.lora_config import LoraTarget

_NUMBERED: Final = re.compile(r"^((?:[^\W\d]\w*\.)+)(\d+)(?=\.|$)")
"""The list of blocks and a block's number, at the beginning of a name of a module or parameter."""


class DecoderParts(NamedTuple):
    """Modules of a decoder, in the order in which it computes them."""

    embeddings: dict[str, nn.Module]
    """Name -> module with parameters, of all that come before the blocks."""
    blocks: nn.ModuleList
    head: dict[str, nn.Module]
    """Likewise of all behind the blocks: the final norm, the output projection."""


def parts_of(decoder: nn.Module) -> DecoderParts:
    """Find the parts of a decoder by looking at its modules.

    Raises:
        TypeError: it has no list of blocks, or several.
    """
    lists = {n: m for n, m in decoder.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    # A list within another one, such as a block's experts, is a part of that.
    outer = [n for n in lists if not any(n.startswith(f"{other}.") for other in lists)]
    if len(outer) != 1:
        found = " and ".join(outer) or "none"
        raise TypeError(
            f"{type(decoder).__qualname__} must have one nn.ModuleList of blocks, not {found}"
        )
    (name,) = outer
    before: dict[str, nn.Module] = {}
    behind: dict[str, nn.Module] = {}
    found_in = before
    for path, module in decoder.named_modules():
        if path == name:
            found_in = behind
        elif not path.startswith(f"{name}.") and module._parameters:
            found_in[path] = module
    return DecoderParts(before, lists[name], behind)


def block_of(name: str) -> int | None:
    """Number of the block that a module or parameter belongs to: 3 of `blocks.3.mlp.fc.weight`."""
    match = _NUMBERED.match(name)
    return None if match is None else int(match[2])


def in_block(name: str, layer: int) -> str:
    """The name that a module or parameter of a block has in block `layer`."""
    return _NUMBERED.sub(rf"\g<1>{layer}", name)


class BlockProjection(NamedTuple):
    """A linear layer of our block."""

    target: LoraTarget
    """The name under which adapters are asked for."""
    sizes: tuple[int, ...]
    """Output rows of each of the matrices that are fused into it."""
    into_residual: bool
    """Its output is added to the residual stream; the other ones read that."""


ATTENTION: Final = ("attn.qkv", "attn.proj")
MLP: Final = ("mlp.fc", "mlp.out")
"""Names of projections within a block: what reads the residual stream, what is added to it."""


def projections(model: ModelConfig) -> dict[str, BlockProjection]:
    """The projections of a block by name, in the order in which it computes them."""
    residual = (model.d_model,)
    found = (
        BlockProjection("qkv", model.qkv_sizes, into_residual=False),
        BlockProjection("proj", residual, into_residual=True),
        BlockProjection("mlp", model.up_sizes, into_residual=False),
        BlockProjection("mlp", residual, into_residual=True),
    )
    return dict(zip((*ATTENTION, *MLP), found, strict=True))


def projection_name(layer: int, projection: str) -> str:
    """Name of a projection of block `layer` in our decoder."""
    return f"blocks.{layer}.{projection}"


def projection_of(name: str) -> str | None:
    """The projection, within its block, that a module or a parameter of it belongs to."""
    match = _NUMBERED.match(name)
    if match is None:
        return None
    inner = f"{name[match.end() + 1 :]}."
    return next((each for each in (*ATTENTION, *MLP) if inner.startswith(f"{each}.")), None)


def is_projection(name: str) -> bool:
    """Return whether a parameter is a projection's matrix, to be quantised, pruned or adapted."""
    return name.endswith(".weight") and projection_of(name) is not None
