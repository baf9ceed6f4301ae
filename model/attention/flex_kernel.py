"""PyTorch's FlexAttention: a kernel generated for what windows and documents leave.

Its mask is a list of 128 x 128 blocks, computed from their distance to the diagonal and from where
documents begin: nothing of size T x T exists, neither in the kernel nor while the mask is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128
MOST_KERNELS = 64


def flex(
    q: Tensor, k: Tensor, v: Tensor, *, mask: BlockMask, window: int | None, dropout: float
) -> Tensor:
    """Compiled at its first call, unless it is part of something that is being compiled."""
    attend: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    out: Tensor = attend(q, k, v, block_mask=mask, enable_gqa=q.size(1) > k.size(1))
    return out


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
def block_mask(
    seq_len: int,
    window: int | None,
    device: torch.device,
    starts: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> BlockMask:
    """Which blocks of queries and keys meet: in part (the mask is applied), or in full.

    Equals `create_block_mask` of the same rule, which would evaluate it for T x T pairs.
    """
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
    """The same object each time: compiled code is tied to it."""
    if window is None:
        return lambda batch, head, query, key: query >= key
    return lambda batch, head, query, key: (query >= key) & (query - key <= window)


@functools.cache
def _compiled() -> Callable[..., Any]:
    # Beyond dynamo's limit of 8 kernels (other shapes, with and without gradients) it would go on
    # with the unfused form, which holds T x T scores, and only warn.
    limited = torch._dynamo.config.patch(
        recompile_limit=MOST_KERNELS, fail_on_recompile_limit_hit=True
    )
    compiled: Callable[..., Any] = limited(torch.compile(flex_attention))
    return compiled
