"""Cross-entropy of a linear head without the full logits; on a GPU one kernel turns a chunk of them
into their gradients, in their own memory."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from launcher.model import fused as kernels

IGNORE_INDEX = -100

_CHUNK_BYTES = 64 * 2**20
_HOST_CHUNK_BYTES = 4 * 2**20
_MOST_FUSED_ROWS = 4096
# What tensor cores read at a time is 16 bytes; rows of a multiple of 64 keep every kernel's tiles.
_ALIGNED_BYTES = 16
_MULTIPLE = 64


def automatic_chunk_rows(
    rows: int, vocab_size: int, d_model: int, *, fused: bool, on_host: bool = False
) -> int:
    """Rows of [B*T] per chunk that save memory, or 0 where the plain loss is the smaller one.

    A chunk's fp32 logits take 64 MiB, or as much as the weight gradient if that is more (then
    chunk_rows = d_model): adding each chunk's gradient to the [V, d] weight gradient costs the same
    whatever the chunk, and at d_model rows or more it stays small beside the chunk's own work.
    On a CPU 4 MiB are faster than 64: what follows the product reads its logits from the cache.

    Bytes grow with the rows, so that a larger micro-batch never needs less. At its highest moment
    the plain loss of N rows holds 3 N V fp32 numbers (log-probabilities, their gradient and the
    logits' one), the chunked one 2 V of each row of a chunk and the V d of the weight gradient; in
    bf16 6 N V bytes less and 2 V d more: the same at N = d_model in both. Chunks begin there, as
    one of all rows, and are not evened out: five of 768 rows and one of 256 are as many sums into
    the weight gradient as six of 683, and 3841 rows would take less than 3840.

    Where the kernel is fused, logits are all that a chunk holds, in the compute type. An eighth of
    the rows then is small beside what blocks keep of all of them, and each sum into the weight
    gradient is worth its traffic; beyond 4096 rows it costs nothing already.
    """
    chunk_bytes = _HOST_CHUNK_BYTES if on_host else _CHUNK_BYTES
    chunk_rows = max(chunk_bytes // (4 * vocab_size), d_model)
    if fused:
        chunk_rows = max(chunk_rows, min(rows // 8, _MOST_FUSED_ROWS))
    elif rows <= d_model:
        return 0
    return min(rows, chunk_rows)


def row_chunks(rows: int, chunk_rows: int) -> Iterable[slice]:
    """Return the rows of each chunk; the last one may have fewer than `chunk_rows`."""
    return [slice(start, start + chunk_rows) for start in range(0, rows, chunk_rows)]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk_rows: int | None,
    softcap: float | None = None,
) -> Tensor:
    """Mean cross-entropy of `hidden @ weight.T` over the targets that are not -100.

    hidden [N, d], weight [V, d], targets [N] int64 -> fp32 scalar; 0 when every target is ignored.
    With chunk_rows > 0 at most [chunk_rows, V] logits exist at a time, and the gradients are
    computed with them in forward, so nothing is recomputed; chunk_rows = 0 is the plain form, and
    None chooses by size. A softcap bounds the logits: softcap * tanh(logits / softcap).
    Under autocast the matmuls run in its dtype, the softmax always in fp32.
    """
    if chunk_rows is None:
        device_type = hidden.device.type
        fused = kernels.fuses(device_type)
        # What a GPU would do is traced on a CPU's tensors.
        how = {"fused": fused, "on_host": device_type == "cpu" and not fused}
        chunk_rows = automatic_chunk_rows(hidden.size(0), *weight.shape, **how)
    if chunk_rows == 0:
        logits, _ = capped(F.linear(hidden, weight).float(), softcap)
        # Not the mean, which is NaN where every target is ignored.
        total = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
        return total / _valid_count(targets)
    training = torch.is_grad_enabled()
    loss: Tensor = _ChunkedLoss.apply(hidden, weight, targets, chunk_rows, softcap, training)
    return loss


def capped(logits: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Return bounded logits and the tanh, in the memory of `logits`, that bounds them; None without
    a bound."""
    if softcap is None:
        return logits, None
    bounded = logits.div_(softcap).tanh_()
    return softcap * bounded, bounded


def through_cap_(grad: Tensor, bounded: Tensor | None) -> None:
    """Multiply gradients of bounded logits by the derivative of the bound; `bounded` is used up."""
    if bounded is not None:
        grad.mul_(bounded.square_().neg_().add_(1))


def _valid_count(targets: Tensor) -> Tensor:
    return (targets != IGNORE_INDEX).sum().clamp(min=1)


def compute_dtype(operand: Tensor) -> torch.dtype:
    """Return the type in which matmuls of a tensor compute, autocast included."""
    device_type = operand.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return operand.dtype


class _ChunkedLoss(torch.autograd.Function):
    """Loss and, while each chunk's logits exist, the gradients of its sum.

    The gradients kept are those of the summed loss; 1/count and grad_output come in backward, in
    fp32. Divided early, an fp16 gradient would underflow before its loss scale arrives.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk_rows: int,
        softcap: float | None,
        training: bool,
    ) -> Tensor:
        dtype, fused = compute_dtype(weight), kernels.fuses(weight.device.type)
        vocab_size = weight.size(0)
        width = padded_size(vocab_size, dtype) if fused else vocab_size
        count = _valid_count(targets)
        wants_hidden, wants_weight = (training and wanted for wanted in ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden, dtype=dtype) if wants_hidden else None
        grad_weight = None
        if wants_weight:
            # Sums of many chunks, so in fp32; rows that only pad are cut off in backward.
            grad_weight = weight.new_zeros(width, weight.size(1), dtype=torch.float32)
        row_loss = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            cast_weight = padded(weight, dtype) if fused else weight.to(dtype)
            chunk = partial(_fused_chunk, vocab_size=vocab_size) if fused else _chunk
            for rows in row_chunks(hidden.size(0), chunk_rows):
                row_loss[rows] = chunk(
                    hidden[rows].to(dtype),
                    cast_weight,
                    targets[rows],
                    softcap=softcap,
                    grad_hidden=None if grad_hidden is None else grad_hidden[rows],
                    grad_weight=grad_weight,
                )
        ctx.save_for_backward(grad_hidden, grad_weight, count)
        ctx.hidden_dtype, ctx.weight_dtype = hidden.dtype, weight.dtype
        ctx.vocab_size, ctx.fused = vocab_size, fused
        return row_loss.sum() / count

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_output: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        grad_hidden, grad_weight, count = ctx.saved_tensors
        scale = grad_output.float() / count
        if grad_hidden is not None:
            # Through fp32: a bf16 tensor times a scalar would round the scalar to bf16. A GPU
            # multiplies by one of fp32 in place, where a CPU would make both copies unseen.
            if ctx.fused:
                grad_hidden = grad_hidden.mul_(scale[None]).to(ctx.hidden_dtype)
            else:
                grad_hidden = (grad_hidden.float() * scale).to(ctx.hidden_dtype)
        if grad_weight is not None:
            # In place, so the largest buffer is not held twice; autograd refuses a second backward.
            grad_weight = grad_weight.mul_(scale)[: ctx.vocab_size].to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _chunk(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    softcap: float | None,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
) -> Tensor:
    """Losses [r] of one chunk; fills grad_hidden [r, d] and adds to grad_weight [V, d]."""
    logits, bounded = capped(F.linear(hidden, weight), softcap)
    log_p = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    ignored = targets == IGNORE_INDEX
    target_index = targets.masked_fill(ignored, 0)[:, None]
    target_log_p = log_p.gather(1, target_index)
    if grad_hidden is not None or grad_weight is not None:
        # d loss / d logits = softmax - one_hot(target), in the memory of log_p.
        # expm1: p - 1 without cancellation where p is near 1.
        grad_logits = log_p.exp_().scatter_(1, target_index, target_log_p.expm1())
        through_cap_(grad_logits, bounded)
        grad_logits = grad_logits.to(hidden.dtype)
        # Ignored rows are cleared on the [r, d] side, V/d times less memory than [r, V].
        if grad_hidden is not None:
            grad_hidden.copy_((grad_logits @ weight).masked_fill_(ignored[:, None], 0.0))
        if grad_weight is not None:
            hidden = hidden.masked_fill(ignored[:, None], 0.0)
            # addmm_ takes one type, and its out_dtype, as in `add_product_`, is not there on a CPU.
            if hidden.dtype == grad_weight.dtype:
                grad_weight.addmm_(grad_logits.t(), hidden)
            else:
                grad_weight.add_(grad_logits.t() @ hidden)
    return -target_log_p.squeeze(1).masked_fill(ignored, 0.0)


def _fused_chunk(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    softcap: float | None,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
    vocab_size: int,
) -> Tensor:
    """Like `_chunk`, with a padded weight; the logits turn into their gradients."""
    training = grad_hidden is not None or grad_weight is not None
    logits, bounded = capped(F.linear(hidden, weight), softcap)
    losses: Tensor = softmax_gradient_(logits, targets, vocab_size, IGNORE_INDEX, training)
    if training:
        through_cap_(logits, bounded)
    if grad_hidden is not None:
        torch.mm(logits, weight, out=grad_hidden)
    if grad_weight is not None:
        add_product_(grad_weight, logits.t(), hidden)
    return losses


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
