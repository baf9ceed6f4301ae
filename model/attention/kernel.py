"""What an attention kernel is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

FIX = "use attention sdpa or auto"
"""What a kernel that cannot run somewhere says in the end: these run everywhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What attention is asked to do. Names no device, so that it can be judged without one."""

    device_type: str
    dtype: torch.dtype
    """Type of q, k and v: the compute type, also where parameters are kept in another."""
    head_size: int
    window: int | None
    dropout: float
    capability: tuple[int, int] | None = None
    """Compute capability of the GPU; None on a CPU, or when no GPU is visible from here."""


class AttentionFunction(Protocol):
    """q, k, v [B, H, T, head_dim] -> [B, H, T, head_dim], causal, scaled by 1/sqrt(head_dim).

    `mask` is what the kernel's `prepare` made for this T; `window` is for kernels that take it
    as a number: token i sees i - window to i.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Any, window: int | None, dropout: float
    ) -> Tensor: ...


def no_mask(seq_len: int, window: int | None, device: torch.device) -> None:
    """For kernels that do their own masking."""


def dense_mask(seq_len: int, window: int | None, device: torch.device) -> Tensor:
    """Bool [T, T], True where a query (row) sees a key (column)."""
    position = torch.arange(seq_len, device=device)
    distance = position[:, None] - position[None, :]
    causal = distance >= 0
    return causal & (distance <= window) if window is not None else causal


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """An attention function and what it needs from the caller."""

    function: AttentionFunction
    prepare: Callable[[int, int | None, torch.device], Any] = no_mask
    """(T, window, device) -> `mask`. Called once per forward, for all blocks, and not cached: a
    cached tensor made under FakeTensorMode or inference_mode would come back in a real step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKernel:
    """Where an attention function can run, known without loading what it runs with."""

    load: Callable[[], Implementation]
    """Imports what only a model needs that uses it (torch's compiler, in half a second)."""
    obstacle: Callable[[Setting], str | None] = lambda setting: None
    """Why it cannot run in a setting and what to do instead, or None when it can."""
    missing: Callable[[Setting], str | None] = lambda setting: None
    """What it needs in a setting and is not installed here, with the fix; None when all is."""

    @property
    def function(self) -> AttentionFunction:
        """What computes it."""
        return self.load().function

    @property
    def prepare(self) -> Callable[[int, int | None, torch.device], Any]:
        """What makes its mask."""
        return self.load().prepare

    def runs(self, setting: Setting) -> bool:
        """Whether it can run in a setting, with what is installed here."""
        return self.obstacle(setting) is None and self.missing(setting) is None
