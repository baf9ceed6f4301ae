"""PyTorch's FlexAttention: a kernel generated for the band that the window leaves.

Its mask is a list of 128 x 128 blocks, computed from their distance to the diagonal: nothing of
size T x T exists, neither in the kernel nor while the mask is made.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from model.attention.kernel import FIX, KERNELS, AttentionKernel, Setting

BLOCK = 128
SMALLEST_HEAD = 16


def obstacle(setting: Setting) -> str | None:
    """Why FlexAttention cannot run in a setting, with the fix."""
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


def missing(setting: Setting) -> str | None:
    """What to install where FlexAttention cannot compile its kernel."""
    if importlib.util.find_spec("triton") is not None:
        return None
    return f"attention flex compiles with triton, which is missing: pip install triton, or {FIX}."


def flex(
    q: Tensor, k: Tensor, v: Tensor, *, mask: BlockMask, window: int | None, dropout: float
) -> Tensor:
    """Compiled at its first call, unless it is part of something that is being compiled."""
    attend: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    out: Tensor = attend(q, k, v, block_mask=mask)
    return out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def block_mask(seq_len: int, window: int | None, device: torch.device) -> BlockMask:
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
    if seq_len % BLOCK:
        full[-1] = False  # its last queries do not exist
    partial = meets & ~full
    return BlockMask.from_kv_blocks(
        *_listed(partial),
        *_listed(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=_rule(window),
        seq_lengths=(seq_len, seq_len),
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Bool [Q, K] -> per query block, how many key blocks and which: [1, 1, Q], [1, 1, Q, K]."""
    count = chosen.sum(-1, dtype=torch.int32)
    order = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True).int()
    return count[None, None], order[None, None]


@functools.cache
def _rule(window: int | None) -> Callable[[Any, Any, Any, Any], Any]:
    """The same object each time: compiled code is tied to it."""
    if window is None:
        return lambda batch, head, query, key: query >= key
    return lambda batch, head, query, key: (query >= key) & (query - key <= window)


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)


KERNELS["flex"] = AttentionKernel(
    function=flex, prepare=block_mask, obstacle=obstacle, missing=missing
)
