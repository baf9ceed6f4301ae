"""Casts of weights under autocast: a block's in one launch, where autocast takes one each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from launcher.model.derived import derived, derives

MOST_ELEMENTS: Final = 4 * 2**20
"""Largest weight that is cast with others: for a larger one a launch is nothing beside its cast,
and its gradient in the low type would be held until the last of the block is there."""


class _CastTogether(torch.autograd.Function):
    """(dtype, weights...) -> the weights in `dtype`; their gradients come back in their own.

    Where all weights have gradients already, of earlier micro-batches or zeros in DDP's buckets,
    these are added to them at once: autograd would do it in a launch for each.
    """

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = [weight.dtype for weight in weights]
        ctx.weights = () if torch.compiler.is_compiling() else weights
        return _copied(weights, [dtype] * len(weights))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        copies = _copied(gradients, ctx.dtypes)
        sums = [weight.grad for weight in ctx.weights if _is_added_to(weight)]
        if not sums or len(sums) < len(copies):
            return None, *copies
        torch._foreach_add_(sums, copies)
        return None, *[None] * len(copies)


def _is_added_to(weight: Tensor) -> bool:
    """Return whether all that autograd would do with a gradient is to add it to the one there is.

    Hooks of the node that does it, as DDP's, are called all the same.
    """
    hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks
    return weight.is_leaf and weight.grad is not None and not hooks


def _copied(tensors: Sequence[Tensor], dtypes: list[torch.dtype]) -> tuple[Tensor, ...]:
    pairs = zip(tensors, dtypes, strict=True)
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor, dtype in pairs]
    torch._foreach_copy_(copies, list(tensors))
    return tuple(copies)


@contextlib.contextmanager
def cast_together(modules: Sequence[nn.Module], device_type: str) -> Iterator[None]:
    """Have modules read casts of their weights, of those that are small.

    The bits are autocast's. Without effect where that is off.
    """
    if not torch.is_autocast_enabled(device_type):
        yield
        return
    found = [
        (module, name, weight)
        for module in _cast(modules)
        for name, weight in module._parameters.items()
        if weight is not None and weight.requires_grad and weight.dtype is torch.float32
    ]
    small = [each for each in found if each[2].numel() <= MOST_ELEMENTS]
    groups = [small] if small else []
    spares = derives()
    if spares:  # else autocast casts the others, and backward is left its casts
        groups += [[each] for each in found if each[2].numel() > MOST_ELEMENTS]
    dtype = torch.get_autocast_dtype(device_type)
    for group in groups:
        weights = [weight for _, _, weight in group]
        casts = _CastTogether.apply(dtype, *weights)
        if spares:
            _recast(dtype, weights, casts)
        # An instance's own attribute is found before its parameters, which stay what they are.
        for (module, name, _), cast in zip(group, casts, strict=True):
            module.__dict__[name] = cast
    try:
        yield
    finally:
        for module, name, _ in chain(*groups):
            del module.__dict__[name]


def _recast(dtype: torch.dtype, weights: Sequence[Tensor], casts: Sequence[Tensor]) -> None:
    """Recast a group's matrices for backward: in one launch, when the first is needed."""
    matrices = [weight for weight in weights if weight.dim() > 1]
    copies: list[Tensor | None] = [None] * len(matrices)

    def take(index: int) -> Tensor:
        if copies[index] is None:
            copies[:] = _copied(matrices, [dtype] * len(matrices))
        copy, copies[index] = copies[index], None  # freed with its reader
        assert copy is not None
        return copy

    for index, cast in enumerate(cast for cast in casts if cast.dim() > 1):
        derived(cast, partial(take, index))


def _cast(modules: Sequence[nn.Module]) -> list[nn.Module]:
    # What is derived from a Linear may use its weight otherwise.
    linears: list[nn.Module] = [each for each in modules if type(each) is nn.Linear]
    if not linears or not torch.compiler.is_compiling():
        return linears
    # Norms' kernels take any type, but a compiler casts each gradient of theirs in a launch of its
    # own. In fp8, without such linears, it would keep more for them.
    return [*linears, *(each for each in modules if isinstance(each, nn.LayerNorm | nn.RMSNorm))]


def fresh_casts(device_type: str) -> torch.autocast:
    """Autocast as it is, but each use of a weight casts it anew: one cast that tiles share would
    sum their gradients in low precision, an error that grows with their number."""
    return torch.autocast(
        device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
        cache_enabled=False,
    )
