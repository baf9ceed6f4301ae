"""The textbook form, and PyTorch's fused one: both take the window as a T x T mask."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from launcher.model.attention.kernel import Setting, dense_mask
from launcher.model.config import SdpaBackend

BACKENDS: Final[dict[SdpaBackend, SDPBackend]] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def eager(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor, window: int | None, dropout: float
) -> Tensor:
    """Holds [B, H, T, T] scores; softmax in fp32 whatever the input dtype."""
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(q.size(-1)))
    scores = scores.masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
    return F.dropout(weights, dropout) @ v


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    window: int | None,
    dropout: float,
    backend: SDPBackend | None = None,
) -> Tensor:
    """PyTorch's fused attention; it chooses the backend itself where none is given."""
    attend = partial(
        F.scaled_dot_product_attention, attn_mask=mask, is_causal=mask is None, dropout_p=dropout
    )
    if backend is None:
        return attend(q, k, v)
    with sdpa_kernel(backend):
        return attend(q, k, v)


def sdpa_mask(seq_len: int, window: int | None, device: torch.device) -> Tensor | None:
    """None for plain causal attention, which the fused kernels do without a mask."""
    bites = window is not None and window < seq_len - 1
    return dense_mask(seq_len, window, device) if bites else None


def sdpa_backend(
    setting: Setting, wanted: SdpaBackend, *, device: torch.device, seq_len: int
) -> SdpaBackend:
    """The backend that PyTorch takes on `device`, by asking it with tensors of one head.

    Raises ValueError when the wanted one cannot run, and lists those that can.
    """
    if wanted != "auto":
        if _runs(setting, BACKENDS[wanted], device, seq_len):
            return wanted
        able = [name for name, b in BACKENDS.items() if _runs(setting, b, device, seq_len)]
        window = "" if setting.window is None else f", window {setting.window}"
        dropout = "" if setting.dropout == 0.0 else f", dropout {setting.dropout}"
        raise ValueError(
            f"sdpa_backend {wanted} cannot run on {device.type} with {setting.dtype}, heads of "
            f"{setting.head_size}{window}{dropout}; use {' or '.join([*able, 'auto'])}."
        )
    chosen = SDPBackend(_ask(setting, device, seq_len))
    return next(name for name, backend in BACKENDS.items() if backend == chosen)


def _runs(setting: Setting, backend: SDPBackend, device: torch.device, seq_len: int) -> bool:
    with sdpa_kernel(backend), warnings.catch_warnings(action="ignore"):  # it warns why not
        try:
            return SDPBackend(_ask(setting, device, seq_len)) == backend
        except RuntimeError:  # "No available kernel", in several wordings
            return False


def _ask(setting: Setting, device: torch.device, seq_len: int) -> int:
    shape = (1, 1, seq_len, setting.head_size)
    q = torch.empty(shape, dtype=setting.dtype, device=device, requires_grad=True)
    mask = sdpa_mask(seq_len, setting.window, device)
    choice: int = torch._fused_sdp_choice(q, q, q, mask, setting.dropout, mask is None)
    return choice
