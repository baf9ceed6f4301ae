"""Tell whether a program's step can be priced, and in which format it multiplies."""

from __future__ import annotations

import sys
from typing import Any

import torch

from shardscale_rehearsal import recurrent


def unpriced(mode: type[Any]) -> str | None:
    """Return why a step has no seconds if its operators are followed by a mode of this kind; None
    if it has."""
    if torch._C._len_torch_dispatch_stack():
        return "the program has a dispatch mode of its own around its steps"
    if _is_compiled() and not hasattr(mode.__base__, "ignore_compile_internals"):
        return (
            f"torch {torch.__version__} runs compiled code uncompiled while its operators are "
            "followed: update torch"
        )
    if recurrent.used - {recurrent.CTC}:
        return "torch's own kernels for recurrent networks take far longer than cuDNN's"
    return None


def in_tf32() -> dict[str, bool]:
    """Return whether products of matrices in fp32 are in TF32, and whether convolutions are, as
    torch has them unless a program says otherwise."""
    cudnn = torch.backends.cudnn
    return {
        "tf32": _is_tf32(torch.backends.cuda.matmul),
        "tf32_convolutions": _is_tf32(getattr(cudnn, "conv", cudnn)),
    }


def _is_tf32(settings: Any) -> bool:
    # torch 2.9 and newer have this, too, and refuse to read the other once a program has set it
    precision = getattr(settings, "fp32_precision", None)
    return bool(settings.allow_tf32 if precision is None else precision == "tf32")


def _is_compiled() -> bool:
    """Return True if torch.compile has compiled a part of the program."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["stats"]["calls_captured"])
