"""Tell whether a program's step can be priced, in which format it multiplies, and what kernels in
Triton move."""

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


def moved_bytes(args: Any, kwargs: Any, names: Any) -> list[int]:
    """Return the bytes that a kernel of Triton moves: its tensors once, those that it changes in
    place twice, of each no more than as many elements as it has threads for (a table is not read
    whole)."""
    # torch.compile passes the elements per axis as integers (xnumel, rnumel)
    numbers = [one for one in args if isinstance(one, int) and not isinstance(one, bool)]
    elements = 1
    for number in numbers:
        elements *= max(1, number)
    sizes = []
    for place, value in enumerate((*args, *kwargs.values())):
        if not isinstance(value, torch.Tensor):
            continue
        name = str(names[place]) if place < len(names) else ""
        size = value.numel() * value.element_size()
        if numbers and name.startswith(("in_", "out_")):
            size = min(size, elements * value.element_size())
        sizes.append(2 * size if name.startswith("in_out_") else size)
    return sizes


def multiplies(kernel: Any) -> bool:
    """Return True for a kernel in Triton that multiplies, perhaps in a function that it calls."""
    if "TEMPLATE" in str(getattr(kernel, "heuristic_type", "")):
        return True  # torch.compile's own, of which all do: products, convolutions, FlexAttention
    function = getattr(kernel, "fn", kernel)
    functions = [function]
    if python := getattr(function, "fn", None):  # torch.compile keeps none
        functions += [python.__globals__.get(name) for name in python.__code__.co_names]
    return any("tl.dot" in str(getattr(each, "src", "")) for each in functions)
