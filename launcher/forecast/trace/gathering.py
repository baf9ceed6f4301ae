"""The model as DeepSpeed's stage 3 runs it, for the trace: every module marked, linears its own.

deepspeed 0.19.8 wraps inputs and outputs of every module in autograd functions, to fetch and
release parameters around it (runtime/zero/parameter_offload.py), and replaces `F.linear` by a
function that keeps its weight as it is (runtime/zero/linear.py). Both change which tensors live
when, so the trace does the same; without importing deepspeed, which takes longer than the trace.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launcher.forecast.trace.patched import patched

# (module name, whether it is entered, whether forwards)
Mark = Callable[[str, bool, bool], None]


class _Linear(torch.autograd.Function):
    """LinearFunctionForZeroStage3, for inputs of at least two dimensions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        if bias is not None and x.dim() == 2:
            return torch.addmm(bias, x, weight.t())
        out = x.matmul(weight.t())
        if bias is not None:
            out += bias
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        of_x, of_weight, of_bias = (*ctx.needs_input_grad, False)[:3]  # two without a bias
        grad_x = grad.matmul(weight) if of_x else None
        grad_weight = None
        if of_weight:
            grad_weight = grad.reshape(-1, grad.shape[-1]).t().matmul(x.reshape(-1, x.shape[-1]))
        grad_bias = grad.sum([*range(grad.dim() - 1)]) if of_bias else None
        return grad_x, grad_weight, grad_bias


class _Passing(torch.autograd.Function):
    """Nothing but a word when the gradient comes by."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, passing: Callable[[], None]) -> Tensor:
        ctx.passing = passing
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.passing()
        return grad, None


def mark_modules(root: nn.Module, mark: Mark) -> None:
    """Have every module say when it is entered and left, forwards and backwards."""
    for name, module in root.named_modules():
        _mark_module(name, module, mark)


def _mark_module(name: str, module: nn.Module, mark: Mark) -> None:
    def before(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        mark(name, True, True)
        missing = sum(isinstance(each, Tensor) and each.requires_grad for each in inputs)

        def passing() -> None:  # with the last of its inputs' gradients it is left
            nonlocal missing
            missing -= 1
            if missing == 0:
                mark(name, False, False)

        return tuple(_follow(each, passing) for each in inputs)

    def after(module: nn.Module, inputs: Any, output: Any) -> Any:
        mark(name, False, True)
        return _follow(output, lambda: mark(name, True, False))

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def _follow(value: Any, passing: Callable[[], None]) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_follow(each, passing) for each in value)
    if isinstance(value, dict):  # an output of transformers, among others
        for name in value:
            value[name] = _follow(value[name], passing)
        return value
    return _Passing.apply(value, passing) if isinstance(value, Tensor) else value


def stage3_linears() -> AbstractContextManager[None]:
    """Replace `F.linear` as DeepSpeed does."""
    return patched((F, "linear", _Linear.apply))
