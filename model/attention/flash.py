"""FlashAttention: the flash-attn packages where they are installed, else torch's own copy of FA2.

All of them take the window as two numbers, so no mask exists. FA3 and FA4 run through torch's
`_flash_attention_forward`, whose kernel torch swaps for theirs: one operator to differentiate,
trace and checkpoint, whatever does the work.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from importlib import metadata

import torch
from torch import Tensor

from model.attention.kernel import FIX, KERNELS, AttentionKernel, Setting

LARGEST_HEAD = 256
_INSTALL = "pip install flash-attn --no-build-isolation"


def implementation(capability: tuple[int, int] | None, dropout: float) -> str | None:
    """FA3, FA4, `flash-attn VERSION`, `torch's FA2`, or None when there is none."""
    major = 0 if capability is None else capability[0]
    if dropout == 0.0:  # the newer two have none
        if major == 9 and importlib.util.find_spec("flash_attn_interface") is not None:
            return "FA3"
        if major in (9, 10) and _version("flash-attn-4") is not None:
            return "FA4"
    version = _version("flash-attn")
    if version is not None:
        return f"flash-attn {version}"
    return "torch's FA2" if torch.backends.cuda.is_flash_attention_available() else None


def obstacle(setting: Setting) -> str | None:
    """Why FlashAttention cannot run in a setting, with the fix."""
    if setting.device_type != "cuda":
        return f"attention flash needs a GPU, and this is {setting.device_type}; {FIX}."
    if setting.dtype not in (torch.bfloat16, torch.float16):
        return f"attention flash computes in bf16 or fp16, not in {setting.dtype}; {FIX}."
    if setting.head_size % 8 or setting.head_size > LARGEST_HEAD:
        return (
            f"attention flash takes head sizes that are multiples of 8 up to {LARGEST_HEAD}, not "
            f"{setting.head_size}; {FIX}."
        )
    if setting.capability is not None and setting.capability < (8, 0):
        capability = ".".join(map(str, setting.capability))
        return f"attention flash needs compute capability 8.0, this GPU has {capability}; {FIX}."
    return None


def missing(setting: Setting) -> str | None:
    """What to install where there is no FlashAttention for a setting."""
    if implementation(setting.capability, setting.dropout) is not None:
        return None
    return f"attention flash is not installed, and this torch has none: {_INSTALL}, or {FIX}."


def flash(
    q: Tensor, k: Tensor, v: Tensor, *, mask: None, window: int | None, dropout: float
) -> Tensor:
    """The newest implementation that is installed for this GPU."""
    # [B, T, H, head_dim], the layout that the projection leaves: no copy on the way.
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    if _uses_package(q.device, dropout):
        out = _package(q, k, v, window=window, dropout=dropout)
    else:
        out = through_torch(q, k, v, window=window, dropout=dropout)
    return out.transpose(1, 2)


def through_torch(q: Tensor, k: Tensor, v: Tensor, *, window: int | None, dropout: float) -> Tensor:
    """q, k, v [B, T, H, head_dim] through torch's operator, whichever kernel stands behind it."""
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


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
@functools.cache
def _uses_package(device: torch.device, dropout: float) -> bool:
    """Whether the flash-attn package (FA2) does it; puts FA3 or FA4 behind torch's operator."""
    name = implementation(torch.cuda.get_device_capability(device), dropout)
    assert name is not None
    if name in ("FA3", "FA4"):
        torch.nn.attention.activate_flash_attention_impl(name)
    return name.startswith("flash-attn")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


KERNELS["flash"] = AttentionKernel(function=flash, obstacle=obstacle, missing=missing)
