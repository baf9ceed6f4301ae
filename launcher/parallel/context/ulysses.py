"""Ulysses: context-parallel attention by exchanging tokens for heads.

Between two all-to-alls each rank has all tokens of some heads, so that any kernel does, with its
windows and masks (DeepSpeed-Ulysses, arXiv:2309.14509).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from launcher.model.attention.kernel import AttentionFunction, Prepare
from launcher.parallel.groups import ContextGroup, exchanged


def ulysses(kernel: AttentionFunction, context_group: ContextGroup) -> AttentionFunction:
    """`kernel` for [B, H, T/ranks, head_dim]; its mask is one for T.

    Key and value heads that are fewer than ranks are repeated until each rank has one.
    """
    ranks = context_group.rank.size

    def attend(
        q: Tensor, k: Tensor, v: Tensor, *, mask: Any, window: int | None, dropout: float
    ) -> Tensor:
        # Heads are exchanged whole: each rank needs at least one of keys and values.
        if (repeats := ranks // k.size(1)) > 1:
            k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        q, k, v = (to_heads(x, context_group) for x in (q, k, v))
        return to_tokens(kernel(q, k, v, mask=mask, window=window, dropout=dropout), context_group)

    return attend


def full_mask(prepare: Prepare, context_group: ContextGroup) -> Prepare:
    """Return the kernel's mask for all of T, prepared from a rank's local sequence length."""

    def prepared(
        seq_len: int,
        window: int | None,
        device: torch.device,
        starts: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Any:
        if starts is not None:
            starts = context_group.all_gather(starts.contiguous()).transpose(0, 1).flatten(1)
        return prepare(context_group.rank.size * seq_len, window, device, starts, dtype)

    return prepared


def to_heads(x: Tensor, context_group: ContextGroup) -> Tensor:
    """Exchange tokens for heads: [B, H, T/ranks, e] -> [B, H/ranks, T, e]."""
    return exchanged(x, partial(_to_heads, context_group), partial(_to_tokens, context_group))


def to_tokens(x: Tensor, context_group: ContextGroup) -> Tensor:
    """Exchange heads for tokens: [B, H/ranks, T, e] -> [B, H, T/ranks, e]."""
    return exchanged(x, partial(_to_tokens, context_group), partial(_to_heads, context_group))


def _to_heads(context_group: ContextGroup, x: Tensor) -> Tensor:
    # Tokens come first on the way, so that what arrives from the ranks in order is in order.
    # [ranks, T/ranks, B, H/ranks, e], by the rank whose heads they are.
    chunks = x.unflatten(1, (context_group.rank.size, -1)).permute(1, 3, 0, 2, 4).contiguous()
    return context_group.all_to_all(chunks).flatten(0, 1).permute(1, 2, 0, 3)


def _to_tokens(context_group: ContextGroup, x: Tensor) -> Tensor:
    # [ranks, T/ranks, B, H/ranks, e], by the rank whose tokens they are.
    chunks = x.permute(2, 0, 1, 3).unflatten(0, (context_group.rank.size, -1)).contiguous()
    # As one heads wide row per token, which is how the next projection reads it.
    received = context_group.all_to_all(chunks).permute(2, 1, 0, 3, 4)
    return received.flatten(2, 3).transpose(1, 2)
