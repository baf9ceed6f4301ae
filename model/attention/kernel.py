"""The signature that attention kernels share, and what is known of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

FIX = "use attention sdpa or auto"
"""End of the sentence of a kernel that cannot run somewhere: these run everywhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSetting:
    """A task of attention. Names no device, so that it can be judged without one."""

    device_type: str
    dtype: torch.dtype
    """Type of q, k and v: the compute type, also where parameters are kept in another."""
    head_size: int
    window: int | None
    dropout: float
    documents: bool = False
    """Sequences hold several documents that do not see each other."""
    capability: tuple[int, int] | None = None
    """Compute capability of the GPU; None on a CPU, or when no GPU is visible from here."""


class AttentionFunction(Protocol):
    """q [B, H, T, head_dim] and k, v of as many heads, or of fewer that divide them, each for
    consecutive query heads -> [B, H, T, head_dim], causal, scaled by 1/sqrt(head_dim).

    `mask` is what the kernel's `prepare` made for this T; `window` is for kernels that take it
    as a number: token i sees i - window to i.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Any, window: int | None, dropout: float
    ) -> Tensor: ...


class Prepare(Protocol):
    """(T, window, device) -> `mask`. Called once per forward, for all blocks, and not cached: a
    cached tensor made under FakeTensorMode or inference_mode would come back in a real step.

    `starts` [B, T] int64, where sequences hold documents that do not see each other: the index in
    its sequence of the first token of each token's document. `dtype` is that of q, k and v.
    """

    def __call__(
        self,
        seq_len: int,
        window: int | None,
        device: torch.device,
        starts: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Any: ...


def dense_mask(
    seq_len: int,
    window: int | None,
    device: torch.device,
    starts: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Bool [T, T], True where a query (row) sees a key (column); [B, 1, T, T] with documents."""
    position = torch.arange(seq_len, device=device)
    distance = position[:, None] - position[None, :]
    seen = distance >= 0
    if window is not None:
        seen = seen & (distance <= window)
    if starts is not None:
        seen = (seen & (position >= starts[:, :, None]))[:, None]
    return seen


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKernel:
    """An attention function, and where it can run."""

    function: AttentionFunction
    prepare: Prepare
    """Makes its `mask`."""
    obstacle: Callable[[AttentionSetting], str | None] = lambda setting: None
    """Reason why it cannot run in a setting and what to do instead, or None when it can."""
    missing: Callable[[AttentionSetting], str | None] = lambda setting: None
    """The package missing here for a setting, with the fix; None when all is installed."""
    fused: bool = True
    """It skips the scores that are masked, and its backward computes the others again."""
    compiles_alone: bool = False
    """It is compiled on its own, and compiled code stands aside for the dispatch modes of selective
    checkpointing."""
    in_16_bits: bool = False
    """It computes in bf16 and fp16 only."""
    skips_window: bool = False
    """A window is no mask to it, so that it skips what is outside."""
