"""One Triton kernel turns logits into the gradients of their loss, in their own memory.

Imported where a GPU's logits are at hand; anywhere else triton may be absent.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 8


@triton.jit
def _softmax_gradient(
    logits,
    targets,
    losses,
    row_stride,
    VOCAB_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    IGNORED: tl.constexpr,
    WRITES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for a row. The maximum and the sum are found in one pass (Milakov and Gimelshein,
    arXiv:1805.02867), a second one writes.

    A target that is no token makes its row NaN, so that the step is not applied. Triton's own
    assertions are compiled only on request, where torch's are always there.
    """
    row = tl.program_id(0).to(tl.int64)  # rows * stride can exceed 2^31
    logits += row * row_stride
    target = tl.load(targets + row)
    counts = target != IGNORED
    known = (target >= 0) & (target < VOCAB_SIZE)
    # Before the first barrier, and so before any thread writes.
    of_target = tl.load(logits + target, mask=known, other=float("nan")).to(tl.float32)
    top = -float("inf")
    total = 0.0
    for start in range(0, VOCAB_SIZE, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(logits + index, mask=index < VOCAB_SIZE, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, axis=0))
        shift = tl.where(higher == -float("inf"), 0.0, higher)  # -inf minus -inf is NaN
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(x - shift), axis=0)
        top = higher
    log_sum = tl.where(known, top + tl.log(total), float("nan"))
    tl.store(losses + row, tl.where(counts, log_sum - of_target, 0.0))
    if WRITES:
        for start in range(0, WIDTH, BLOCK):
            index = start + tl.arange(0, BLOCK)
            x = tl.load(logits + index, mask=index < VOCAB_SIZE, other=-float("inf"))
            gradient = tl.exp(x.to(tl.float32) - log_sum) - tl.where(index == target, 1.0, 0.0)
            gradient = tl.where(counts, gradient, 0.0)
            tl.store(logits + index, gradient.to(x.dtype), mask=index < WIDTH)


def launch(
    logits: Tensor, targets: Tensor, vocab_size: int, ignore_index: int, writes: bool
) -> Tensor:
    """Run the kernel of `launcher.model.loss.softmax_gradient_` on contiguous rows."""
    losses = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
    rows, width = logits.shape
    _softmax_gradient[(rows,)](
        logits,
        targets,
        losses,
        logits.stride(0),
        VOCAB_SIZE=vocab_size,
        WIDTH=width,
        IGNORED=ignore_index,
        WRITES=writes,
        BLOCK=min(_BLOCK, triton.next_power_of_2(width)),
        num_warps=_WARPS,
    )
    return losses
