"""Activation checkpointing of a block: recompute all of it, all but some products, or the MLP tile
by tile; and without it the activation between the MLP's projections alone.

torch's own `create_selective_checkpoint_contexts` refuses any operator in the recomputation that
it did not meet in the forward. Parameters that are gathered on demand (ZeRO-3) are fetched by
other operators the second time, so the two modes here look only at the operators that are kept.
Compiled code has no dispatch modes; there torch's own contexts mark what the compiler keeps.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from launcher.model import fused
from launcher.model.attention import fuses_scores
from launcher.model.casts import fresh_casts
from launcher.model.checkpointing import PRODUCTS, kept_products
from launcher.model.config import ModelConfig
from launcher.model.derived import deriving
from launcher.model.products import linear_products

# Fused kernels, which selective checkpointing keeps the output of; those of packages by namespace.
FUSED_OPS = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._flash_attention_forward.default,
    }
)
_FUSED_NAMESPACES = frozenset({"flash_attn"})
# Where the weight is among their arguments. torchao's products in fp8 come as `mm` of its own
# tensors; without those, as in a plan, they come as the kernel.
_LINEAR_OPS = {
    torch.ops.aten.mm.default: 1,
    torch.ops.aten.addmm.default: 2,
    torch.ops.aten._scaled_mm.default: 1,
}
_BATCHED_MATMUL_OPS = frozenset({torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default})

T = TypeVar("T")
_Kept = defaultdict[Any, deque[Any]]


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
    products = partial(_Products, config)
    if not tiles or mode in ("full", "offload"):
        return recomputed(mode, products, block, x, sequences)
    # Tiles keep no matmul, and would be recomputed once more inside.
    return transform(recomputed(mode, products, attend, x, sequences))


def _derives(config: ModelConfig, x: Tensor) -> bool:
    """Return whether each of what selective checkpointing computes again can be by itself.

    Not masks of dropout, scores, or an RMSNorm that is composed of other operators, which keep more
    than its input.
    """
    if config.dropout > 0.0 or not fuses_scores(config):
        return False
    return fused.takes(x) or (config.norm == "layer" and not config.qk_norm)


def recomputed(
    mode: str,
    products: Callable[[], AllProducts | _Products],
    function: Callable[..., T],
    x: Tensor,
    *args: Any,
    **kwargs: Any,
) -> T:
    """Return function(x, ...), of which backward recomputes what a block of `mode` does not keep.

    Args:
        products: makes what tells the products that are kept, if some are.
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
        contexts = _compiled_contexts if torch.compiler.is_compiling() else selective_contexts
        out = again(function, x, *args, context_fn=partial(contexts, products), **kwargs)
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


def as_one(compute: Callable[[], T], *, attention: bool = False) -> T:
    """Run `compute`, without autograd, as one operator: a block's next linear product, or its
    attention. Selective checkpointing keeps its result, and nothing inside."""
    if torch.compiler.is_compiling():
        return compute()
    stack = _get_current_dispatch_mode_stack()
    modes = [mode for mode in stack if isinstance(mode, _Selective)]
    return modes[-1].as_one(compute, attention) if modes else compute()


def selective_contexts(
    products: Callable[[], AllProducts | _Products],
) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Make the contexts of forward and recomputation for `torch.utils.checkpoint`."""
    kept: _Kept = defaultdict(deque)
    return _Selective(products(), kept), _Selective(products(), kept, recomputes=True)


def _compiled_contexts(products: Callable[[], AllProducts | _Products]) -> Any:
    forward, again = products(), products()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = (again if ctx.is_recompute else forward).keeps(op, args)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class AllProducts:
    """Tells which operators make a product that is kept, in a block of any decoder: linear ones and
    fused attention, but for the second product of an adapter, which is as wide and cheap."""

    def __init__(self, rank: int | None) -> None:
        self._rank = rank

    def keeps(self, op: Any, args: tuple[Any, ...]) -> bool:
        if op in FUSED_OPS:
            return not _draws_numbers(op, args)
        return op in _LINEAR_OPS and args[_LINEAR_OPS[op]].size(0) != self._rank

    def keeps_as_one(self, attention: bool) -> bool:
        return True


def _draws_numbers(op: Any, args: tuple[Any, ...]) -> bool:
    """Return whether fused attention drops weights: to skip it would shift every later mask."""
    at = [argument.name for argument in op._schema.arguments].index("dropout_p")
    return at < len(args) and args[at] > 0.0


class _Products:
    """Tells which operators make a product of a block that is kept, asked for each in order: once
    in the forward, and once more in the recomputation."""

    def __init__(self, config: ModelConfig) -> None:
        self._kept = kept_products(config.activation_checkpointing)
        # Skipping a kernel that draws random numbers would shift every later dropout mask.
        self._keeps_fused = "attention" in self._kept and config.dropout == 0.0
        self._expected = deque(linear_products(config))

    def keeps(self, op: Any, args: tuple[Any, ...]) -> bool:
        """Return whether an operator's output is kept: a matmul's or attention's, not a norm's."""
        if op in FUSED_OPS or getattr(op, "namespace", None) in _FUSED_NAMESPACES:
            return self._keeps_fused
        if op in _LINEAR_OPS:
            weight = args[_LINEAR_OPS[op]]
            if self._expected and tuple(weight.shape) == self._expected[0].shape:
                return self.keeps_next_linear()
            return self._kept == PRODUCTS
        return op in _BATCHED_MATMUL_OPS and "attention" in self._kept

    def keeps_next_linear(self) -> bool:
        """Return whether the output of the block's next linear product is kept."""
        return self._expected.popleft().kept_with in self._kept

    def keeps_as_one(self, attention: bool) -> bool:
        return "attention" in self._kept if attention else self.keeps_next_linear()


class _Selective(TorchDispatchMode):
    """Keeps the outputs worth their memory, and hands them back in the recomputation, in order."""

    def __init__(
        self, products: AllProducts | _Products, kept: _Kept, *, recomputes: bool = False
    ) -> None:
        super().__init__()
        self._products, self._kept, self._recomputes = products, kept, recomputes
        self._inside = False
        self._handed_back: set[StorageWeakRef] = set()

    def as_one(self, compute: Callable[[], T], attention: bool) -> T:
        """Run `compute` as one operator and ignore those inside."""

        def alone() -> T:
            self._inside = True
            out = compute()
            self._inside = False
            return out

        return self._kept_or(as_one, alone, self._products.keeps_as_one(attention))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        changes = self._handed_back and func._schema.is_mutable and isinstance(args[0], Tensor)
        if changes and _storage(args[0]) in self._handed_back:
            return args[0]  # what is kept was changed in the forward already
        keeps = not self._inside and self._products.keeps(func, args)
        return self._kept_or(func, partial(func, *args, **(kwargs or {})), keeps)

    def _kept_or(self, key: Any, compute: Callable[[], T], keeps: bool) -> T:
        if not keeps:
            return compute()
        if self._recomputes:
            out: T = self._kept[key].popleft()
            self._handed_back.update(_storage(t) for t in tree_leaves(out) if isinstance(t, Tensor))
            return out
        out = compute()
        self._kept[key].append(tree_map_only(Tensor, Tensor.detach, out))
        return out


def _storage(tensor: Tensor) -> StorageWeakRef:
    """Refer to memory without keeping it; no later storage is equal."""
    return StorageWeakRef(tensor.untyped_storage())
