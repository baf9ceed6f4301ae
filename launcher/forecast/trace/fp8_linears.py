"""Linears as torchao computes them in fp8, for the trace; without importing torchao.

torchao 0.18.0's float8/float8_linear.py and float8_training_tensor.py: the input and the weight are
kept as they are, not a cast of the weight, and both are scaled in fp32, saturated and cast for each
of the three products; what a product reads across its rows is copied to lie along them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from launcher.model.recompute import as_one


class _Linear(torch.autograd.Function):
    """The storages of matmul_with_hp_or_float8_args, without its values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        operands = _in_fp8(x), _in_fp8(weight)
        # The product alone is what selective checkpointing keeps.
        return as_one(lambda: _product(x, (x.size(0), weight.size(0)), *operands))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        left, right = _in_fp8(grad), _in_fp8(weight)
        grad_x = _product(grad, (grad.size(0), weight.size(1)), left, right, right.clone())
        left, right = _in_fp8(grad), _in_fp8(x)
        grad_weight = _product(
            grad, (weight.size(0), weight.size(1)), left, right, left.clone(), right.clone()
        )
        return grad_x, grad_weight


def _in_fp8(tensor: Tensor) -> Tensor:
    tensor.abs()  # of which the largest gives the scale
    scaled = tensor.to(torch.float32) * 1.0
    return scaled.clamp(-1.0, 1.0).to(torch.uint8)


def _product(like: Tensor, shape: tuple[int, int], *_: Tensor) -> Tensor:
    """The result beside its operands."""
    return like.new_empty(shape)


@contextlib.contextmanager
def fp8_linears(computed: torch.dtype) -> Iterator[None]:
    """Have every `nn.Linear` allocate as torchao's, which compute in `computed` around products."""
    module = cast(Any, nn.Linear)
    original = module.forward

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y: Tensor = _Linear.apply(x.to(computed), self.weight)
            return y if self.bias is None else y + self.bias.to(y.dtype)

    module.forward = forward
    try:
        yield
    finally:
        module.forward = original
