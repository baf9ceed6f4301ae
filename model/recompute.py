"""Activation checkpointing of a block: recompute all of it, all but some products, or the MLP tile
by tile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from launcher.model import fused
from launcher.model.attention import fuses_scores
from launcher.model.casts import fresh_casts
from launcher.model.config import ModelConfig
from launcher.model.derived import deriving

if TYPE_CHECKING:
    from launcher.model.selective import AllProducts, BlockProducts

T = TypeVar("T")


def recomputing(
    attend: Callable[[Tensor, Any], Tensor],
    transform: Callable[[Tensor], Tensor],
    x: Tensor,
    sequences: Any,
    config: ModelConfig,
    training: bool,
    *,
    casting: Callable[[str], contextlib.AbstractContextManager[None]],
) -> Tensor:
    """Run the halves of a block, `transform(attend(x, sequences))`; in `training` backward
    recomputes what the config does not keep.

    Args:
        casting: (type of device) -> a context in which the halves find their weights cast. Not for
            tiles, each of which casts anew (`fresh_casts`), nor in a compiler's checkpoint, which
            may change nothing outside of it.
    """
    tiles = config.mlp_tile is not None
    mode = config.activation_checkpointing if training else "none"  # this block's own
    compiling = torch.compiler.is_compiling()
    together = training and not tiles and not (mode != "none" and compiling)
    if tiles:
        transform = partial(_tiled, transform, config=config, training=training)

    def block(x: Tensor, sequences: Any) -> Tensor:
        with casting(x.device.type) if together else contextlib.nullcontext():
            return transform(attend(x, sequences))

    if mode == "none":
        return block(x, sequences)
    if mode == "selective" and not tiles and not compiling and _derives(config, x):
        with deriving():
            return block(x, sequences)
    from launcher.model.selective import BlockProducts

    products = partial(BlockProducts, config)
    if not tiles or mode in ("full", "offload"):
        return recomputed(mode, products, block, x, sequences)
    # Tiles keep no matmul, and would be recomputed once more inside.
    return transform(recomputed(mode, products, attend, x, sequences))


def _derives(config: ModelConfig, x: Tensor) -> bool:
    """Return whether selective checkpointing can recompute single tensors, and rerun no block.

    Masks of dropout, unfused scores, and an RMSNorm that is composed of several operators would all
    be saved.
    """
    if config.dropout > 0.0 or not fuses_scores(config):
        return False
    return fused.takes(x) or (config.norm == "layer" and not config.qk_norm)


def recomputed(
    mode: str,
    products: Callable[[], AllProducts | BlockProducts],
    function: Callable[..., T],
    x: Tensor,
    *args: Any,
    sees_all: bool = True,
    **kwargs: Any,
) -> T:
    """Return function(x, ...), of which backward recomputes what a block of `mode` does not keep.

    Args:
        products: makes what tells the products that are kept, if some are.
        sees_all: see `selective_contexts`.
    """
    again = partial(checkpoint, use_reentrant=False)
    out: T
    if mode == "offload":
        from launcher.model.offload import offload_saved

        with offload_saved():  # x alone, and not what all blocks share
            out = again(lambda x: function(x, *args, **kwargs), x)
    elif mode == "full":
        out = again(function, x, *args, **kwargs)
    else:
        from launcher.model.selective import compiled_contexts, selective_contexts

        eager = partial(selective_contexts, products, sees_all=sees_all)
        contexts = partial(compiled_contexts, products)
        context_fn = contexts if torch.compiler.is_compiling() else eager
        out = again(function, x, *args, context_fn=context_fn, **kwargs)
    return out


def _tiled(
    function: Callable[[Tensor], Tensor], x: Tensor, *, config: ModelConfig, training: bool
) -> Tensor:
    """`function(x)` for x [B, T, d], on at most `mlp_tile` of the B*T tokens at a time.

    Backward recomputes one tile after the other, so that what is inside exists for one at a time.
    """
    if training:
        function = partial(
            checkpoint, function, use_reentrant=False, preserve_rng_state=config.dropout > 0.0
        )
    assert config.mlp_tile is not None
    rows = x.flatten(0, 1).unsqueeze(0)
    with fresh_casts(x.device.type):
        return torch.cat(by_tiles(function, rows, config.mlp_tile), dim=1).view_as(x)


def by_tiles(function: Callable[[Tensor], Tensor], rows: Tensor, tile: int) -> list[Tensor]:
    """Apply `function` to rows [1, N, d], at most `tile` of them at a time."""
    return [function(part) for part in rows.split(tile, dim=1)]
