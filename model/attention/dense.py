"""The textbook form, and PyTorch's fused one: windows and documents are a T x T mask to both."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from launcher.model.attention.kernel import AttentionKernel, AttentionSetting, dense_mask
from launcher.model.config import SdpaBackend
from launcher.util.errors import UserError

BACKENDS: Final[dict[SdpaBackend, SDPBackend]] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
ROW_ALIGNMENT: Final = 16
"""Elements between rows of a mask: the largest that memory-efficient attention has asked for."""
ON_GPUS_ONLY: Final[frozenset[SdpaBackend]] = frozenset({"cudnn", "efficient"})


def eager(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor, window: int | None, dropout: float
) -> Tensor:
    """Holds [B, H, T, T] scores; softmax in fp32 whatever the input dtype."""
    batch, kv_heads, seq_len, head_size = k.shape
    # The queries that share a key head are rows of one product.
    rows = q.reshape(batch, kv_heads, -1, head_size)
    scores = (rows @ k.transpose(-2, -1)) * (1.0 / math.sqrt(head_size))
    scores = scores.view(batch, -1, seq_len, seq_len).masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
    weights = F.dropout(weights, dropout).view(batch, kv_heads, -1, seq_len)
    return (weights @ v).view_as(q)


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
    groups = q.size(1) > k.size(1)
    grouped = groups and takes_groups(q.device.type, q.dtype, mask, backend)
    if groups and not grouped:
        k, v = repeat_for(q, k, v)
    attend = partial(
        F.scaled_dot_product_attention,
        attn_mask=mask,
        is_causal=mask is None,
        dropout_p=dropout,
        enable_gqa=grouped,
    )
    if backend is None:
        return attend(q, k, v)
    with sdpa_kernel(backend):
        return attend(q, k, v)


def takes_groups(
    device_type: str, dtype: torch.dtype, mask: Tensor | None, backend: SDPBackend | None
) -> bool:
    """Return whether a fused kernel takes fewer key heads than query heads.

    A CPU's does, and on GPUs those for half precision without a mask. Others would fall back to
    all T x T scores.
    """
    if device_type == "cpu":
        return True
    able = backend is not SDPBackend.EFFICIENT_ATTENTION and mask is None
    return able and dtype in (torch.float16, torch.bfloat16)


def repeat_for(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with a head for each of q's."""
    groups = q.size(1) // k.size(1)
    return k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)


def sdpa_mask(
    seq_len: int,
    window: int | None,
    device: torch.device,
    starts: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor | None:
    """None for plain causal attention, which the fused kernels do without a mask.

    That of a window, [T, T], or of documents, [B, 1, T, T], is what is added to the scores, in
    their type: of a bool each block would make its own, and keep it for backward.
    """
    if starts is None and (window is None or window >= seq_len - 1):
        return None
    hidden = ~dense_mask(seq_len, window, device, starts)
    # Rows as GPUs' kernels want them: of others each block would make its own, too.
    aligned = (*hidden.shape[:-1], -(-seq_len // ROW_ALIGNMENT) * ROW_ALIGNMENT)
    added = torch.zeros(aligned, dtype=dtype, device=device)[..., :seq_len]
    return added.masked_fill_(hidden, float("-inf"))


def sdpa_backend(
    setting: AttentionSetting, wanted: SdpaBackend, *, device: torch.device, seq_len: int
) -> SdpaBackend:
    """The backend that PyTorch takes on `device`, by asking it with tensors of one head.

    Raises UserError when the wanted one cannot run, and lists those that can.
    """
    if wanted != "auto":
        if _runs(setting, BACKENDS[wanted], device, seq_len):
            return wanted
        able = [name for name, b in BACKENDS.items() if _runs(setting, b, device, seq_len)]
        window = "" if setting.window is None else f", window {setting.window}"
        dropout = "" if setting.dropout == 0.0 else f", dropout {setting.dropout}"
        dropout += ", attention inside documents" if setting.documents else ""
        raise UserError(
            f"sdpa_backend {wanted} cannot run on {device.type} with {setting.dtype}, heads of "
            f"{setting.head_size}{window}{dropout}; use {' or '.join([*able, 'auto'])}."
        )
    chosen = SDPBackend(_ask(setting, device, seq_len))
    return next(name for name, backend in BACKENDS.items() if backend == chosen)


def _runs(
    setting: AttentionSetting, backend: SDPBackend, device: torch.device, seq_len: int
) -> bool:
    with sdpa_kernel(backend), warnings.catch_warnings(action="ignore"):  # it warns why not
        try:
            return SDPBackend(_ask(setting, device, seq_len)) == backend
        except RuntimeError:  # "No available kernel", in several wordings
            return False


def _ask(setting: AttentionSetting, device: torch.device, seq_len: int) -> int:
    shape = (1, 1, seq_len, setting.head_size)
    q = torch.empty(shape, dtype=setting.dtype, device=device, requires_grad=True)
    starts = torch.zeros(1, seq_len, dtype=torch.int64, device=device)
    documents = starts if setting.documents else None
    mask = sdpa_mask(seq_len, setting.window, device, documents, setting.dtype)
    choice: int = torch._fused_sdp_choice(q, q, q, mask, setting.dropout, mask is None)
    return choice


EAGER = AttentionKernel(function=eager, prepare=dense_mask, fused=False)
SDPA = AttentionKernel(function=sdpa, prepare=sdpa_mask)
