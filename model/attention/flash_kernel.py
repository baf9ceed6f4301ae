"""FlashAttention: the flash-attn packages where they are installed, else torch's own copy of FA2.

All of them take the window as two numbers, so no mask exists. FA3 and FA4 run through torch's
`_flash_attention_forward`, whose kernel torch swaps for theirs: one operator to differentiate,
trace and checkpoint, whatever does the work.
"""

from __future__ import annotations

import functools
import importlib

import torch
from torch import Tensor

from launcher.model.attention.flash import implementation


def flash(
    q: Tensor, k: Tensor, v: Tensor, *, mask: None, window: int | None, dropout: float
) -> Tensor:
    """The newest implementation that is installed for this GPU."""
    # [B, T, H, head_dim], the layout that the projection leaves: no copy on the way.
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    if _uses_package(q.device, dropout, window):
        out = _package(q, k, v, window=window, dropout=dropout)
    else:
        out = through_torch(q, k, v, window=window, dropout=dropout)
    return out.transpose(1, 2)


def through_torch(q: Tensor, k: Tensor, v: Tensor, *, window: int | None, dropout: float) -> Tensor:
    """q, k, v [B, T, H, head_dim], of k and v fewer heads where they are shared, through torch's
    operator, whichever kernel stands behind it."""
    left, right = (-1, -1) if window is None else (window, 0)
    seq_len = q.size(1)
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        None,
        None,
        seq_len,
        seq_len,
        dropout,
        window is None,  # is_causal; a window is causal by ending at 0 on the right
        False,
        window_size_left=left,
        window_size_right=right,
    )[0]
    return out


def _package(q: Tensor, k: Tensor, v: Tensor, *, window: int | None, dropout: float) -> Tensor:
    attend = importlib.import_module("flash_attn").flash_attn_func
    size = (-1, -1) if window is None else (window, 0)
    out: Tensor = attend(q, k, v, dropout_p=dropout, causal=True, window_size=size)
    return out


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's
@functools.cache
def _uses_package(device: torch.device, dropout: float, window: int | None) -> bool:
    """Whether the flash-attn package (FA2) does it; puts FA3 or FA4 behind torch's operator."""
    name = implementation(torch.cuda.get_device_capability(device), dropout, window)
    assert name is not None
    if name in ("FA3", "FA4"):
        torch.nn.attention.activate_flash_attention_impl(name)
    return name.startswith("flash-attn")
