"""Cross-entropy of a head whose vocabulary is sharded over the tensor-parallel group.

As in launcher.model.loss gradients are made in forward while a chunk's logits exist; here a chunk's
hidden rows are gathered, too, and no rank ever has all of them, or logits of all tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from launcher.model import loss as head_loss
from launcher.model.gpt import LMHead
from launcher.model.loss import (
    IGNORE_INDEX,
    automatic_chunk_rows,
    capped,
    compute_dtype,
    through_cap_,
)
from launcher.parallel.groups import TensorGroup


class VocabParallelHead(nn.Module):
    """Rows [first, first + n) of the head, and the loss over all rows.

    Args:
        head: of which it takes the weight.
        vocab_size: of the whole.
        first: row of the whole that its weight begins with.
    """

    def __init__(
        self, head: LMHead, tensor_group: TensorGroup, *, vocab_size: int, first: int
    ) -> None:
        super().__init__()
        self.weight, self.loss_chunk = head.weight, head.loss_chunk
        self.vocab_size, self.first, self.tensor_group = vocab_size, first, tensor_group

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """hidden [1, r, d] of this rank, targets [B, T] of all -> scalar mean loss."""
        return vocab_parallel_loss(
            hidden.flatten(0, -2),
            self.weight,
            targets,
            chunk_rows=self.loss_chunk,
            vocab_size=self.vocab_size,
            first=self.first,
            tensor_group=self.tensor_group,
        )


def vocab_parallel_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk_rows: int | None,
    vocab_size: int,
    first: int,
    tensor_group: TensorGroup,
    softcap: float | None = None,
) -> Tensor:
    """Return the mean cross-entropy of this rank's hidden [r, d], or [B*T, d] that all have alike.

    Args:
        weight: rows of the head from `first` on, of `vocab_size`.
        targets: [B, T] of all rows.
        chunk_rows: of all ranks together; 0 for all rows, None to choose.
    """
    rows, vocab_ranks = targets.numel(), tensor_group.rank.size
    scattered = hidden.size(0) < rows or vocab_ranks == 1
    ranks = vocab_ranks if scattered else 1
    if chunk_rows is None:
        most = -(-vocab_size // vocab_ranks)  # the same on all ranks, which go chunk by chunk
        chunk_rows = automatic_chunk_rows(rows, most, weight.size(1), fused=False)
    loss: Tensor = _VocabParallelLoss.apply(
        hidden,
        weight,
        targets.reshape(ranks, -1),
        -(-(chunk_rows or rows) // ranks),
        first,
        tensor_group,
        softcap,
        scattered,
        torch.is_grad_enabled(),
    )
    return loss


class _VocabParallelLoss(torch.autograd.Function):
    """hidden [r, d], weight [v, d], targets [ranks, r] int64 -> fp32 scalar; unless hidden is
    scattered over the ranks, each has all of it, and targets are [1, r]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk_rows: int,
        first: int,
        tensor_group: TensorGroup,
        softcap: float | None,
        scattered: bool,
        training: bool,
    ) -> Tensor:
        dtype = compute_dtype(weight)
        grad_hidden = torch.empty_like(hidden) if training else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if training else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            cast_weight = weight.to(dtype)
            for rows in head_loss.row_chunks(hidden.size(0), chunk_rows):
                whole = hidden[rows].to(dtype)
                if scattered:
                    whole = tensor_group.all_gather(whole)
                wanted = targets[:, rows].flatten()  # as the rows are gathered
                logits, bounded = capped((whole @ cast_weight.t()).float(), softcap)
                total += _losses(logits, wanted, first, tensor_group).sum()
                if grad_hidden is None or grad_weight is None:
                    continue
                through_cap_(logits, bounded)
                grad_logits = logits.to(dtype)
                grad_rows = grad_logits @ cast_weight
                grad_hidden[rows] = (
                    tensor_group.reduce_scatter(grad_rows) if scattered else grad_rows
                )
                if dtype == torch.float32:
                    grad_weight.addmm_(grad_logits.t(), whole)
                else:
                    grad_weight.add_(grad_logits.t() @ whole)
        count = (targets != IGNORE_INDEX).sum().clamp(min=1)
        ctx.save_for_backward(grad_hidden, grad_weight, count)
        ctx.weight_dtype = weight.dtype
        ctx.reduced_over = None if scattered else tensor_group
        return total / count

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_output: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None, None, None, None, None]:
        grad_hidden, grad_weight, count = ctx.saved_tensors
        scale = grad_output.float() / count
        # Through fp32: a bf16 tensor times a scalar would round the scalar itself to bf16.
        grad_hidden = (grad_hidden.float() * scale).to(grad_hidden.dtype)
        if ctx.reduced_over is not None:
            ctx.reduced_over.all_reduce(grad_hidden)
        # In place, so the largest buffer is not held twice; autograd refuses a second backward.
        grad_weight = grad_weight.mul_(scale).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None, None


def _losses(logits: Tensor, targets: Tensor, first: int, tensor_group: TensorGroup) -> Tensor:
    """Losses [n] of logits [n, v] over this rank's shard of the vocabulary, which turn into the
    gradients of the losses' sum. Two small reductions, and 0 for what is ignored."""
    top = tensor_group.all_reduce_max(logits.amax(-1))
    logits.sub_(top[:, None])
    counts = targets != IGNORE_INDEX
    index = targets - first
    here = (index >= 0) & (index < logits.size(1)) & counts
    # Index 0 stands for targets of other ranks; what is gathered there, or added, is 0.
    index = index.masked_fill_(~here, 0)[:, None]
    of_target = logits.gather(1, index).squeeze(1).masked_fill_(~here, 0.0)
    logits.exp_()
    # Softmax's denominator, and the target's logit, which one rank has: one reduction for both.
    sums, of_target = tensor_group.all_reduce(torch.stack((logits.sum(-1), of_target)))
    logits.div_(sums[:, None]).masked_fill_(~counts[:, None], 0.0)
    logits.scatter_add_(1, index, -here.to(logits.dtype)[:, None])
    losses: Tensor = (sums.log() - of_target).masked_fill_(~counts, 0.0)
    return losses
