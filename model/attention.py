"""Causal self-attention kernels behind one signature.

A new kernel is one function under `@attention_kernel` (and its name in config.AttentionKind).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import AttentionKind

MaskUse = Literal["always", "window", "never"]


class AttentionFunction(Protocol):
    """q, k, v [B, H, T, head_dim] -> [B, H, T, head_dim], causal, scaled by 1/sqrt(head_dim).

    `mask` is a bool [T, T] tensor, True where a query (row) sees a key (column), or None when
    the kernel does its own masking; `window` is for kernels that take it as a number.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None,
        window: int | None,
        dropout: float,
    ) -> Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKernel:
    """An attention function and what it needs from the caller."""

    function: AttentionFunction
    mask: MaskUse
    """When the kernel needs an explicit mask: always, only for a window, or never."""


KERNELS: dict[str, AttentionKernel] = {}

# Fused kernels, which selective checkpointing keeps the output of.
FUSED_OPS = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }
)


def attention_kernel(
    name: str, *, mask: MaskUse
) -> Callable[[AttentionFunction], AttentionFunction]:
    """Register an attention function under `name`."""

    def register(function: AttentionFunction) -> AttentionFunction:
        KERNELS[name] = AttentionKernel(function=function, mask=mask)
        return function

    return register


@attention_kernel("eager", mask="always")
def eager(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, window: int | None, dropout: float
) -> Tensor:
    """The textbook form: holds [B, H, T, T] scores; softmax in fp32 whatever the input dtype."""
    assert mask is not None
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(q.size(-1)))
    scores = scores.masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
    return F.dropout(weights, dropout) @ v


@attention_kernel("sdpa", mask="window")
def sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, window: int | None, dropout: float
) -> Tensor:
    """PyTorch's fused attention, which chooses its own backend (flash, cuDNN, efficient, math)."""
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=dropout
    )


def build_mask(
    kernel: AttentionKernel, seq_len: int, window: int | None, device: torch.device
) -> Tensor | None:
    """The bool [T, T] mask the kernel needs for this sequence length, or None.

    Built once per forward and handed to every block rather than cached: a cached tensor made
    under FakeTensorMode or inference_mode would come back in a real training step.
    """
    windowed = window is not None and window < seq_len - 1
    if kernel.mask == "never" or (kernel.mask == "window" and not windowed):
        return None
    position = torch.arange(seq_len, device=device)
    distance = position[:, None] - position[None, :]
    causal = distance >= 0
    return causal & (distance <= window) if window is not None else causal


def resolve_attention(kind: AttentionKind, *, window: int | None) -> tuple[str, str]:
    """The kernel that will run, and why, for the log."""
    if kind != "auto":
        return kind, "requested"
    if window is not None:
        return "sdpa", "fused attention with the window as an explicit mask"
    return "sdpa", "fused attention, which never holds the T x T scores"
