"""The loss of a chunk of logits on a GPU: one kernel, in the logits' own memory."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

# What tensor cores read at a time is 16 bytes; rows of a multiple of 64 keep every kernel's tiles.
_ALIGNED_BYTES = 16
_MULTIPLE = 64


@cache
def fuses(device_type: str) -> bool:
    """Whether triton can build the kernel for such a device."""
    return device_type == "cuda" and find_spec("triton") is not None


@torch.library.custom_op("shardscale::softmax_gradient_", mutates_args=("logits",))
def softmax_gradient_(
    logits: Tensor, targets: Tensor, vocab_size: int, ignore_index: int, writes: bool
) -> Tensor:
    """Cross-entropy [r] in fp32 of logits [r, V + padding] and targets [r] int64.

    With `writes` the logits become the gradients of the losses' sum, 0 in rows whose target is
    `ignore_index` and in what pads them; without they stay.
    """
    from launcher.model.softmax_kernel import launch

    return launch(logits, targets, vocab_size, ignore_index, writes)


@softmax_gradient_.register_fake
def _(logits: Tensor, targets: Tensor, vocab_size: int, ignore_index: int, writes: bool) -> Tensor:
    return logits.new_empty(targets.shape, dtype=torch.float32)


def padded_size(rows: int, dtype: torch.dtype) -> int:
    """Rows of a head's weight, so many that products with them are aligned."""
    if dtype == torch.float32 or rows * dtype.itemsize % _ALIGNED_BYTES == 0:
        return rows
    return -(-rows // _MULTIPLE) * _MULTIPLE


def padded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """weight [V, d] in `dtype`, below it rows of zeros where V is not aligned."""
    rows = padded_size(weight.size(0), dtype)
    if rows == weight.size(0):
        return weight.to(dtype)
    larger = weight.new_zeros(rows, weight.size(1), dtype=dtype)
    larger[: weight.size(0)].copy_(weight)
    return larger


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, summed in the fp32 of total whatever the operands' type."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
