"""FlashAttention: the flash-attn packages where they are installed, else torch's own copy of FA2.

All of them take the window as two numbers, so no mask exists. FA3 and FA4 run through torch's
`_flash_attention_forward`, whose kernel torch swaps for theirs: one operator to differentiate,
trace and checkpoint, whichever kernel computes it.
"""

from __future__ import annotations

import ast
import functools
import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

from launcher.model.attention.kernel import FIX, AttentionKernel, AttentionSetting
from launcher.util.packages import INSTALL_FLASH_ATTENTION, files_of, version_of

LARGEST_HEAD = 256
_UNPACKED_BY_TORCH = 2


def implementation(
    capability: tuple[int, int] | None, dropout: float, window: int | None
) -> str | None:
    """FA3, FA4, `flash-attn VERSION`, `torch's FA2`, or None when there is none."""
    major = 0 if capability is None else capability[0]
    if dropout == 0.0:  # the newer two have none
        if major == 9 and importlib.util.find_spec("flash_attn_interface") is not None:
            return "FA3"
        # The backward of FA4 refuses a window.
        if major in (9, 10) and window is None and fa4_fits_torch():
            return "FA4"
    version = version_of("flash-attn")
    if version is not None:
        return f"flash-attn {version}"
    return "torch's FA2" if torch.backends.cuda.is_flash_attention_available() else None


@functools.cache
def fa4_fits_torch() -> bool:
    """Return whether the forward of flash-attn-4 declares the two tensors that torch's
    wrapper (torch.nn.attention._fa4) unpacks. Read and not imported, which would need a GPU."""
    return _returned_by_fa4() == _UNPACKED_BY_TORCH


def _returned_by_fa4() -> int | None:
    files = files_of("flash-attn-4")
    source = next((f for f in files if f.as_posix().endswith("flash_attn/cute/interface.py")), None)
    if source is None:
        return None
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == "_flash_attn_fwd":
            match node.returns:
                case ast.Subscript(slice=ast.Tuple(elts=elements)):
                    return len(elements)
    return None


def obstacle(setting: AttentionSetting) -> str | None:
    """Say why FlashAttention cannot run in a setting, with the fix."""
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


def missing(setting: AttentionSetting) -> str | None:
    """Name the package to install where there is no FlashAttention for a setting."""
    if implementation(setting.capability, setting.dropout, setting.window) is not None:
        return None
    if (version := version_of("flash-attn-4")) is not None:
        return (
            f"attention flash: flash-attn-4 {version} cannot be used here (no window, no dropout, "
            f"and what this torch calls), and there is no "
            f"other: {INSTALL_FLASH_ATTENTION}, or {FIX}."
        )
    return (
        "attention flash is not installed, and this torch has none: "
        f"{INSTALL_FLASH_ATTENTION}, or {FIX}."
    )


def document_bounds(
    seq_len: int,
    window: int | None,
    device: torch.device,
    starts: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor | None:
    """Return where each document begins among all B*T tokens, and B*T behind them, as int32
    [documents + 1]; None where each sequence is one. The host waits for the number of documents."""
    if starts is None:
        return None
    # The first token always begins a document: left out here, it is the 0 that is padded below.
    begins = (starts == torch.arange(seq_len, device=device)).flatten()
    after_first = begins[1:].nonzero().flatten() + 1
    return F.pad(F.pad(after_first, (1, 0)), (0, 1), value=starts.numel()).int()


def flash(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, window: int | None, dropout: float
) -> Tensor:
    """Attend by the newest implementation for this GPU; `mask` is of `document_bounds`."""
    # [B, T, H, head_dim], the layout that the projection leaves: no copy on the way.
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    shape = q.shape
    if mask is not None:  # one document after the other
        q, k, v = (part.flatten(0, 1) for part in (q, k, v))
    attend = _package if _uses_package(q.device, dropout, window) else through_torch
    out = attend(q, k, v, bounds=mask, longest=shape[1], window=window, dropout=dropout)
    return out.view(shape).transpose(1, 2)


def through_torch(
    *qkv: Tensor, bounds: Tensor | None, longest: int, window: int | None, dropout: float
) -> Tensor:
    """Attend with q, k, v [B, T, H, head_dim], of k and v fewer heads where they are shared,
    through torch's operator, whichever kernel stands behind it; with `bounds` of documents of at
    most `longest` tokens, [B*T, H, head_dim]."""
    # Behind torch 2.11 FA4's backward takes no numbers, not even the -1 that stands for none.
    left, right = (None, None) if window is None else (window, 0)
    out: Tensor = torch.ops.aten._flash_attention_forward(
        *qkv,
        bounds,
        bounds,
        longest,
        longest,
        dropout,
        window is None,  # is_causal; a window is causal by ending at 0 on the right
        False,  # no debug mask
        window_size_left=left,
        window_size_right=right,
    )[0]
    return out


def _package(
    *qkv: Tensor, bounds: Tensor | None, longest: int, window: int | None, dropout: float
) -> Tensor:
    package = importlib.import_module("flash_attn")
    size = (-1, -1) if window is None else (window, 0)
    how = {"dropout_p": dropout, "causal": True, "window_size": size}
    out: Tensor
    if bounds is None:
        out = package.flash_attn_func(*qkv, **how)
    else:
        out = package.flash_attn_varlen_func(*qkv, bounds, bounds, longest, longest, **how)
    return out


@functools.cache
def _uses_package(device: torch.device, dropout: float, window: int | None) -> bool:
    """Return whether the flash-attn package (FA2) computes; else put FA3 or FA4, if here, behind
    torch's operator."""
    name = implementation(torch.cuda.get_device_capability(device), dropout, window)
    assert name is not None
    if name in ("FA3", "FA4"):
        torch.nn.attention.activate_flash_attention_impl(name)
    return name.startswith("flash-attn")


# As torch.compiler.assume_constant_result does, which imports dynamo, half a second, to do so; of
# what is cached, dynamo looks inside.
vars(_uses_package.__wrapped__)["_dynamo_marked_constant"] = True


FLASH = AttentionKernel(
    function=flash,
    prepare=document_bounds,
    obstacle=obstacle,
    missing=missing,
    in_16_bits=True,
    skips_window=True,
)
