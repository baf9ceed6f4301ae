"""Tensor-parallel modules over shards of the matrices, sequence-parallel ones between them.

Each takes the parameters of the plain module that it replaces, which keep their names, and sees
[r, d]: r = B*T / ranks of the rows of [B*T, d]. A rank's rows give only a summand of the gradient
of replicated parameters (norms, biases that are added to a sum); it is summed where it arises, so
that strategies get whole gradients and need not know.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launcher.model.derived import as_one
from launcher.model.layers import normalized
from launcher.model.loss import compute_dtype
from launcher.parallel.groups import TensorGroup, exchanged, unchanged


class ColumnParallelLinear(nn.Module):
    """A projection of all rows to this rank's columns: [r, in] -> [ranks * r, out / ranks]."""

    def __init__(self, linear: nn.Linear, tensor_group: TensorGroup) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.tensor_group = tensor_group

    def forward(self, x: Tensor) -> Tensor:
        """Keeps this rank's rows for backward, and gathers the others' again."""
        y: Tensor = _ColumnParallelLinear.apply(x, self.weight, self.bias, self.tensor_group)
        return y


class _ColumnParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tensor_group: TensorGroup
    ) -> Tensor:
        dtype = compute_dtype(weight)
        rows = x.to(dtype)
        ctx.save_for_backward(rows, weight)
        ctx.tensor_group, ctx.x_dtype = tensor_group, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype

        def product() -> Tensor:
            with torch.autocast(x.device.type, enabled=False):
                whole = tensor_group.all_gather(rows)
                if bias is None:
                    return whole @ weight.to(dtype).t()
                return torch.addmm(bias.to(dtype), whole, weight.to(dtype).t())

        return as_one(product)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        # This rank's columns give a summand of the gradient of all rows.
        grad_x = ctx.tensor_group.reduce_scatter(grad @ weight.to(grad.dtype)).to(ctx.x_dtype)
        grad_weight = (grad.t() @ ctx.tensor_group.all_gather(rows)).to(weight.dtype)
        grad_bias = None if ctx.bias_dtype is None else grad.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None


class RowParallelLinear(nn.Module):
    """A projection from this rank's columns, summed over the ranks to their rows:
    [ranks * r, in / ranks] -> [r, out]. The bias is added once, to the sum.

    Args:
        last: it ends its block, and recomputation stops before it. Others are one function, whose
            output selective checkpointing keeps, so that nothing is sent twice.
    """

    def __init__(self, linear: nn.Linear, tensor_group: TensorGroup, *, last: bool) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias: Tensor | None = linear.bias
        self.tensor_group, self.last = tensor_group, last

    def forward(self, x: Tensor) -> Tensor:
        """x [ranks * r, in / ranks] -> [r, out]."""
        rows: Tensor
        if self.last:
            rows = reduce_scattered(F.linear(x, self.weight), self.tensor_group)
        else:
            rows = _RowParallelLinear.apply(x, self.weight, self.tensor_group)
        if self.bias is None:
            return rows
        return rows + replicated(self.bias, self.tensor_group).to(rows.dtype)


class _RowParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tensor_group: TensorGroup) -> Tensor:
        dtype = compute_dtype(weight)
        ctx.save_for_backward(x, weight)
        ctx.tensor_group = tensor_group

        def product() -> Tensor:
            with torch.autocast(x.device.type, enabled=False):
                return tensor_group.reduce_scatter(x.to(dtype) @ weight.to(dtype).t())

        return as_one(product)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        whole = ctx.tensor_group.all_gather(grad.contiguous())
        grad_x = (whole @ weight.to(whole.dtype)).to(x.dtype)
        grad_weight = (whole.t() @ x.to(whole.dtype)).to(weight.dtype)
        return grad_x, grad_weight, None


class ScatteredDropout(nn.Dropout):
    """Dropout on a rank's rows of a sum over its group: [B, T, d] -> [1, r, d]."""

    def __init__(self, dropout: nn.Dropout, tensor_group: TensorGroup) -> None:
        super().__init__(dropout.p)
        self.tensor_group = tensor_group

    def forward(self, x: Tensor) -> Tensor:
        """Rows follow each other as in [B*T, d]."""
        return super().forward(reduce_scattered(x.flatten(0, 1), self.tensor_group)[None])


class VocabParallelEmbedding(nn.Module):
    """Rows [first, first + n) of a table; those of other ranks are looked up as 0."""

    def __init__(self, weight: Tensor, first: int) -> None:
        super().__init__()
        self.weight, self.first = weight, first

    def forward(self, indices: Tensor) -> Tensor:
        """Indices into the whole table, of any shape -> [..., d]."""
        here = indices - self.first
        elsewhere = (here < 0) | (here >= self.weight.size(0))
        found = F.embedding(here.masked_fill_(elsewhere, 0), self.weight)
        return found.masked_fill_(elsewhere[..., None], 0.0)


class SequenceParallelNorm(nn.Module):
    """LayerNorm or RMSNorm of a rank's rows, or of its heads."""

    def __init__(self, norm: nn.LayerNorm | nn.RMSNorm, tensor_group: TensorGroup) -> None:
        super().__init__()
        self.weight, self.shape = norm.weight, list(norm.normalized_shape)
        self.bias: Tensor | None = getattr(norm, "bias", None)
        assert norm.eps is not None
        self.eps = norm.eps
        self.tensor_group = tensor_group

    def forward(self, x: Tensor, *, beside: bool = False) -> Any:
        """Compute the norm that it replaces."""
        bias = None if self.bias is None else replicated(self.bias, self.tensor_group)
        weight = replicated(self.weight, self.tensor_group)
        return normalized(x, self.shape, weight, bias, self.eps, beside=beside)


def replicated(parameter: Tensor, tensor_group: TensorGroup) -> Tensor:
    """Return a replicated parameter, whose gradient is the sum over the ranks."""

    def summed(grad: Tensor) -> Tensor:
        # In fp32, and not in autograd's own tensor, which others may read.
        return tensor_group.all_reduce(grad.to(torch.float32, copy=True)).to(grad.dtype)

    return exchanged(parameter, unchanged, summed)


def reduce_scattered(x: Tensor, tensor_group: TensorGroup) -> Tensor:
    """[ranks * r, d], a summand on each rank -> its rows [r, d] of the sum."""
    return exchanged(
        x, tensor_group.reduce_scatter, lambda grad: tensor_group.all_gather(grad.contiguous())
    )
