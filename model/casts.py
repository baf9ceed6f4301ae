"""Casts of weights under autocast: a block's in one launch, where autocast takes one each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_MOST_ELEMENTS: Final = 4 * 2**20
"""Largest weight that is cast with others: for a larger one a launch is nothing beside its cast,
and its gradient in the low type would be held until the last of the block is there."""


class _CastTogether(torch.autograd.Function):
    """(dtype, weights...) -> the weights in `dtype`; their gradients come back in their own."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = [weight.dtype for weight in weights]
        return _copied(weights, [dtype] * len(weights))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_copied(gradients, ctx.dtypes)


def _copied(tensors: tuple[Tensor, ...], dtypes: list[torch.dtype]) -> tuple[Tensor, ...]:
    pairs = zip(tensors, dtypes, strict=True)
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor, dtype in pairs]
    torch._foreach_copy_(copies, tensors)
    return tuple(copies)


@contextlib.contextmanager
def cast_together(modules: Iterable[nn.Module], device_type: str) -> Iterator[None]:
    """Have modules read casts of their weights, of those that are small.

    The bits are autocast's. Without effect where that is off.
    """
    if not torch.is_autocast_enabled(device_type):
        yield
        return
    found = [
        (module, name, weight)
        for module in modules
        if type(module) is nn.Linear  # what is derived from it may use its weight otherwise
        for name, weight in module._parameters.items()
        if weight is not None and weight.requires_grad and weight.dtype is torch.float32
        if weight.numel() <= _MOST_ELEMENTS
    ]
    if not found:
        yield
        return
    dtype = torch.get_autocast_dtype(device_type)
    casts = _CastTogether.apply(dtype, *(weight for _, _, weight in found))
    # An instance's own attribute is found before its parameters, which stay what they are.
    for (module, name, _), cast in zip(found, casts, strict=True):
        module.__dict__[name] = cast
    try:
        yield
    finally:
        for module, name, _ in found:
            del module.__dict__[name]


def fresh_casts(device_type: str) -> torch.autocast:
    """Autocast as it is, but each use of a weight casts it anew: one cast that tiles share would
    sum their gradients in low precision, an error that grows with their number."""
    return torch.autocast(
        device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
        cache_enabled=False,
    )
