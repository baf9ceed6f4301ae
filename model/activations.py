"""What is between the two projections of an MLP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from launcher.model.config import Activation


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * value (arXiv:2002.05202), whose silu autograd would keep as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, value = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_value = grad_x.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=grad_value)
        torch.ops.aten.silu_backward.grad_input(grad * value, gate, grad_input=grad_gate)
        return grad_x


def swiglu(x: Tensor) -> Tensor:
    """x [..., 2 f], the gate before what it multiplies -> [..., f]."""
    if torch.compiler.is_compiling():  # a compiler fuses the formula, and keeps what it wants
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value
    y: Tensor = _SwiGLU.apply(x)
    return y


ACTIVATIONS: Final[dict[Activation, Callable[[Tensor], Tensor]]] = {
    "gelu": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "swiglu": swiglu,
}

KEEP_THEIR_INPUT: Final[frozenset[Activation]] = frozenset({"gelu", "swiglu"})
"""ReLU keeps its output instead, which the projection behind it needs, too."""
