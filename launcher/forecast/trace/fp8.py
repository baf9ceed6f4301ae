"""Linears in fp8 as torchao 0.18.0 computes them, on tensors without values.

As in its float8/float8_linear.py, float8_training_tensor.py and float8_ops.py: the input and the
weight are kept as they are, not a cast of the weight. Both are scaled in fp32, saturated and cast
for each of the three products; what a product reads across its rows is copied to lie along them.

In compiled blocks a graph has the operators themselves, and torch's partitioner chooses what of
them is kept for backward: mostly the input in fp8, half of it in bf16.
"""

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from launcher.forecast.trace.counting import note_product
from launcher.model.derived import as_one
from launcher.model.linears import fp8_linears

_FORWARD: Final = torch.float8_e4m3fn
_BACKWARD: Final = torch.float8_e5m2
"""Type of gradients, whose range is wider."""


def round_linears(decoder: nn.Module, computed: torch.dtype, *, in_graphs: bool) -> None:
    """Have the linear layers that torchao replaces allocate as its own, which compute in `computed`
    around products.

    Args:
        in_graphs: blocks are compiled.
    """
    if in_graphs:
        # As torchao has it: dynamo does not look into the function. Imported in seconds.
        torch._dynamo.allow_in_graph(_Fp8Graph)

    class Rounding(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x = x.to(computed)
            if in_graphs:
                y: Tensor = _Fp8Graph.apply(x, self.weight.t())
            else:
                with torch.autocast("cpu", enabled=False):
                    y = _Fp8Linear.apply(x, self.weight)
            return y if self.bias is None else y + self.bias.to(y.dtype)

    for linear in fp8_linears(decoder):
        linear.__class__ = Rounding


class _Fp8Linear(torch.autograd.Function):
    """The storages of matmul_with_hp_or_float8_args, without its values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows = x.reshape(-1, x.shape[-1])
        operands = _in_fp8(rows), _in_fp8(weight)
        # The product alone is what selective checkpointing keeps.
        product = as_one(lambda: _fp8_product(rows, rows, weight.t(), *operands))
        return product.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        shape, grad, x = x.shape, grad.flatten(0, -2), x.reshape(-1, x.shape[-1])
        left, right = _in_fp8(grad), _in_fp8(weight)
        grad_x = _fp8_product(grad, grad, weight, left, right, right.clone())
        left, right = _in_fp8(grad), _in_fp8(x)
        grad_weight = _fp8_product(grad, grad.t(), x, left, right, left.clone(), right.clone())
        return grad_x.view(shape), grad_weight


def _in_fp8(tensor: Tensor) -> Tensor:
    tensor.abs()  # of which the largest gives the scale
    scaled = tensor.to(torch.float32) * 1.0  # by a scale
    return scaled.clamp(-1.0, 1.0).to(torch.uint8)  # one byte, as fp8 has


# `*_`: operands in fp8, which live as long as the product takes
def _fp8_product(like: Tensor, left: Tensor, right: Tensor, *_: Tensor) -> Tensor:
    """The result beside its operands."""
    result = like.new_empty(left.size(0), right.size(1))
    note_product(left, right, result, fp8=True)
    return result


class _Scaled(NamedTuple):
    """A matrix in fp8, and what it was multiplied with."""

    matrix: Tensor
    scale: Tensor

    def t(self) -> "_Scaled":
        return _Scaled(self.matrix.t(), self.scale)


class _Fp8Graph(torch.autograd.Function):
    """The operators of matmul_with_hp_or_float8_args."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_t: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_t)
        rows, columns = _scaled(x, _FORWARD), _scaled(weight_t, _FORWARD)
        rows = rows._replace(matrix=rows.matrix.reshape(-1, x.shape[-1]))
        return _multiply(rows, columns, x.dtype).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight_t = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        of_grad, of_weight = _scaled(flat, _BACKWARD), _scaled(weight_t, _FORWARD)
        grad_x = _multiply(of_grad, of_weight.t(), grad.dtype).reshape(x.shape)
        of_grad = _scaled(flat, _BACKWARD)
        of_x = _scaled(x.reshape(-1, x.shape[-1]), _FORWARD)
        return grad_x, _multiply(of_grad.t(), of_x, grad.dtype).t()


def _scaled(tensor: Tensor, dtype: torch.dtype) -> _Scaled:
    most = torch.finfo(dtype).max
    # as torchao: in fp64, so that compiled and eager code round alike; 1e-12 is its EPS
    largest = torch.max(torch.abs(tensor)).to(torch.float64)
    scale = (most / torch.clamp(largest, min=1e-12)).to(torch.float32)
    multiplied = tensor.to(torch.float32) * scale
    return _Scaled(multiplied.clamp(min=-most, max=most).to(dtype), scale)


def _multiply(left: _Scaled, right: _Scaled, dtype: torch.dtype) -> Tensor:
    """The kernel wants the left operand by rows, the right one by columns."""
    product: Tensor = torch._scaled_mm(
        left.matrix.contiguous(),
        right.matrix.t().contiguous().t(),
        scale_a=left.scale.reciprocal(),
        scale_b=right.scale.reciprocal(),
        out_dtype=dtype,
    )
    return product
