"""Where FlashAttention can run, and which of its implementations does."""

from __future__ import annotations

import importlib.util

import torch

from launcher.model.attention.kernel import FIX, Setting
from launcher.packages import version_of

LARGEST_HEAD = 256
_INSTALL = "pip install flash-attn --no-build-isolation"


def implementation(capability: tuple[int, int] | None, dropout: float) -> str | None:
    """FA3, FA4, `flash-attn VERSION`, `torch's FA2`, or None when there is none."""
    major = 0 if capability is None else capability[0]
    if dropout == 0.0:  # the newer two have none
        if major == 9 and importlib.util.find_spec("flash_attn_interface") is not None:
            return "FA3"
        if major in (9, 10) and version_of("flash-attn-4") is not None:
            return "FA4"
    version = version_of("flash-attn")
    if version is not None:
        return f"flash-attn {version}"
    return "torch's FA2" if torch.backends.cuda.is_flash_attention_available() else None


def obstacle(setting: Setting) -> str | None:
    """Why FlashAttention cannot run in a setting, with the fix."""
    if setting.device_type != "cuda":
        return f"attention flash needs a GPU, and this is {setting.device_type}; {FIX}."
    if setting.dtype not in (torch.bfloat16, torch.float16):
        return f"attention flash computes in bf16 or fp16, not in {setting.dtype}; {FIX}."
    if setting.documents:
        return "attention flash cannot stay inside documents; use attention flex, sdpa or auto."
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
