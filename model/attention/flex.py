"""PyTorch's FlexAttention: a kernel generated for what windows and documents leave.

Its mask is a list of 128 x 128 blocks, computed from their distance to the diagonal and from where
documents begin: nothing of size T x T exists, neither in the kernel nor while the mask is made.
Functions import torch's module, which loads its compiler.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from launcher.model.attention.kernel import FIX, AttentionKernel, AttentionSetting

SMALLEST_HEAD = 16
BLOCK = 128
MOST_KERNELS = 64


def obstacle(setting: AttentionSetting) -> str | None:
    """Say why FlexAttention cannot run in a setting, with the fix."""
    if setting.device_type != "cuda":
        return f"attention flex has no backward on {setting.device_type} (torch's limit); {FIX}."
    if setting.dropout > 0.0:
        return f"attention flex cannot drop attention weights (dropout {setting.dropout}); {FIX}."
    if setting.head_size < SMALLEST_HEAD:
        return (
            f"attention flex takes head sizes from {SMALLEST_HEAD}, not {setting.head_size}; {FIX}."
        )
    if setting.capability is not None and setting.capability < (7, 0):
        capability = ".".join(map(str, setting.capability))
        return f"attention flex needs compute capability 7.0, this GPU has {capability}; {FIX}."
    return None


def missing(setting: AttentionSetting) -> str | None:
    """Name the package to install where FlexAttention cannot compile its kernel."""
    if importlib.util.find_spec("triton") is not None:
        return None
    return f"attention flex compiles with triton, which is missing: pip install triton, or {FIX}."


def flex(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Any, window: int | None, dropout: float
) -> Tensor:
    """Compiled at its first call, unless it is part of something that is being compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    attend: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    out: Tensor = attend(q, k, v, block_mask=mask, enable_gqa=q.size(1) > k.size(1))
    return out


def block_mask(
    seq_len: int,
    window: int | None,
    device: torch.device,
    starts: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """The `BlockMask` of blocks that meet: in part (the mask is applied), or in full.

    Equals `create_block_mask` of the same rule, which would evaluate it for T x T pairs. Never
    compiled.
    """
    uncompiled: Any = torch.compiler.disable(_block_mask)
    return uncompiled(seq_len, window, device, starts)


def _block_mask(
    seq_len: int, window: int | None, device: torch.device, starts: Tensor | None
) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    blocks = -(-seq_len // BLOCK)
    index = torch.arange(blocks, device=device)
    distance = (index[:, None] - index[None, :]) * BLOCK
    meets = distance >= 0
    full = distance > 0
    if window is not None:
        # First query to last key, and last query to first key, of two blocks.
        meets &= distance - (BLOCK - 1) <= window
        full &= distance + (BLOCK - 1) <= window
    if starts is not None:
        # A block's first query sees the farthest back, its last one the least far.
        first, last = index * BLOCK, ((index + 1) * BLOCK - 1).clamp(max=seq_len - 1)
        meets = meets & ((starts[:, first, None] < first + BLOCK) | (distance == 0))
        full = full & (starts[:, last, None] <= first)
    if seq_len % BLOCK:
        full[..., -1, :] = False  # its last queries do not exist
    partial = meets & ~full
    return BlockMask.from_kv_blocks(
        *_listed(partial),
        *_listed(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=_rule(window) if starts is None else _rule_of_documents(window, starts),
        seq_lengths=(seq_len, seq_len),
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Bool [Q, K] or [B, Q, K] -> per query block, how many key blocks and which: [B, 1, Q] and
    [B, 1, Q, K], B = 1 where all sequences are alike."""
    count = chosen.sum(-1, dtype=torch.int32)
    # Stable, so that the chosen blocks come first in their order; `count` hides the rest.
    order = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True).int()
    if chosen.dim() == 2:
        count, order = count[None], order[None]
    return count[:, None], order[:, None]


_Rule = Callable[[Any, Any, Any, Any], Any]


def _rule_of_documents(window: int | None, starts: Tensor) -> _Rule:
    inside = _rule(window)
    return lambda batch, head, query, key: (
        inside(batch, head, query, key) & (key >= starts[batch, query])
    )


@functools.cache
def _rule(window: int | None) -> _Rule:
    """Cached, since compiled code is tied to the object."""
    if window is None:
        return lambda batch, head, query, key: query >= key
    return lambda batch, head, query, key: (query >= key) & (query - key <= window)


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # Beyond dynamo's limit of 8 kernels (other shapes, with and without gradients) it would go on
    # with the unfused form, which holds T x T scores, and only warn.
    limited = torch._dynamo.config.patch(
        recompile_limit=MOST_KERNELS, fail_on_recompile_limit_hit=True
    )
    compiled: Callable[..., Any] = limited(torch.compile(flex_attention))
    return compiled


FLEX = AttentionKernel(
    function=flex,
    prepare=block_mask,
    obstacle=obstacle,
    missing=missing,
    compiles_alone=True,
    skips_window=True,
)
