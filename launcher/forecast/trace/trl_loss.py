"""trl's loss over tiles of the logits, of so many tokens and words, computed again in the backward.

As trl 1.16's kernels/chunked_logprob.py: gradients are added up in fp32, and cast at the end.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor

from launcher.forecast.trace.counting import note_product
from launcher.forecast.trace.patched import patched
from launcher.model.foreign import head
from launcher.model.loss import compute_dtype

_TOKENS: Final = 4096
_WORDS: Final = 32_768


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.computed = compute_dtype(hidden)
        with torch.autocast("cpu", enabled=False):
            tile = _tile(hidden, ctx.computed)
            for rows, words in _tiles(hidden, weight, ctx.computed):
                note_product(rows, words.t(), tile[: rows.size(0), : words.size(0)])
        numbers = [hidden.new_empty(hidden.size(0), dtype=torch.float32) for _ in range(2)]
        ctx.save_for_backward(hidden, weight, *numbers)
        return numbers[0].sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight, *_ = ctx.saved_tensors
        wanted = zip((hidden, weight), ctx.needs_input_grad, strict=True)
        sums = [torch.empty_like(x, dtype=torch.float32) if asked else None for x, asked in wanted]
        tile = _tile(hidden, ctx.computed)
        for rows, words in _tiles(hidden, weight, ctx.computed):
            part = tile[: rows.size(0), : words.size(0)]
            # The logits again, then a product for each gradient, of as many FLOPs.
            for _ in (None, *(each for each in sums if each is not None)):
                note_product(rows, words.t(), part)
        # The tile is there until the sums have been cast.
        return tuple(
            None if each is None else each.to(x.dtype)
            for x, each in zip((hidden, weight), sums, strict=True)
        )


def _tile(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return hidden.new_empty(min(hidden.size(0), _TOKENS), _WORDS, dtype=dtype)


def _tiles(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    for rows in hidden.split(_TOKENS):
        cast_rows = rows.to(dtype)
        for words in weight.split(_WORDS):
            yield cast_rows, words.to(dtype)


def _linear_cross_entropy(hidden: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    loss: Tensor = _Loss.apply(hidden.clone(), weight)  # of the tokens that have a target
    return loss


def loss_of_trl() -> AbstractContextManager[None]:
    """Have the head of a decoder of transformers allocate as trl's loss does."""
    return patched((head, "linear_cross_entropy", _linear_cross_entropy))
