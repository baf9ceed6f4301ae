"""Norms, SwiGLU and the rotary embedding in one kernel each, where triton can build them.

They are operators of torch's dispatcher, so that a plan's trace meets them as it meets torch's own:
its tensors have shapes alone, and what an operator returns is all that it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

MOST_WIDTH: Final = 2**14
"""Longest row that a program of the norms' kernels holds."""
_PROGRAMS: Final = 1024
"""Programs that a norm's backward starts; each sums its share of the rows. All models have the same
number, since a plan's trace of one serves for others: its sizes are products of dimensions."""
_TYPES: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})


@cache
def fuses(device_type: str) -> bool:
    """Return whether triton can build kernels for a device."""
    return device_type == "cuda" and find_spec("triton") is not None


def takes(x: Tensor) -> bool:
    """Return whether x is for these kernels; a compiler fuses the formulas itself."""
    if torch.compiler.is_compiling():
        return False
    return fuses(x.device.type) and x.dtype in _TYPES


def takes_norm(x: Tensor) -> bool:
    """Return whether x [..., d] is for the kernels of norms: not heads that lie between others."""
    return takes(x) and x.size(-1) <= MOST_WIDTH and x.is_contiguous()


class Norm(torch.autograd.Function):
    """LayerNorm where there is a bias, RMSNorm without; x contiguous, weight and bias of one type,
    whatever that is, and both trained or neither.

    Returns (x, norm) where x goes on beside its norm, whose backward then adds both gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, beside: bool
    ) -> Any:
        y, *stats = _norm(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, *stats)
        ctx.centered = bias is not None
        # None, and no zeros, for an output that the loss does not depend on.
        ctx.set_materialize_grads(False)
        return (x, y) if beside else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        *beside, grad = gradients
        added = beside[0] if beside else None
        if grad is None:
            return added, None, None, None, None
        x, weight, *stats = ctx.saved_tensors
        if added is not None:
            added = added.contiguous()
        of_x, _, *of_weights = _norm_backward(
            grad.contiguous(), x, weight, *stats, ctx.centered, added
        )
        of_weight, of_bias = of_weights if ctx.centered else (*of_weights, None)
        return of_x, of_weight, of_bias, None, None


class SwiGLU(torch.autograd.Function):
    """silu(gate) * value of x [..., 2 f], the gate before what it multiplies -> [..., f]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        y: Tensor = _swiglu(x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        of_x: Tensor = _swiglu_backward(grad.contiguous(), *ctx.saved_tensors)
        return of_x


class Rotate(torch.autograd.Function):
    """The first `heads` of x [B*T, ...], head_dim wide, turned where they are by cos and sin [T, 1,
    head_dim / 2], which get no gradient.

    Returns the memory of x, which no backward may need; nor may anything else hold the gradient of
    the result, which is turned back in place. Autograd does not know that x changed: it refuses
    that for a view that another function returned. A higher version still exposes a saved x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        return _turned(x.detach(), cos, sin, heads, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad.contiguous(), cos, sin, ctx.heads, True), None, None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, heads: int, back: bool) -> Tensor:
    _rotate(x[:, : heads * 2 * cos.size(-1)], cos, sin, back)
    torch.autograd.graph.increment_version(x)
    return x


def _define(name: str, signature: str, outputs: Callable[..., Any], launch: str) -> Any:
    """Make an operator that returns `outputs(...)`, filled by a kernel of layer_kernels.

    Without `torch.library.custom_op`, whose checks take longer than a kernel of a small model; and
    called past the dispatcher, which takes as long as all else, where no mode looks on: a trace, or
    selective checkpointing.
    """
    name = f"shardscale::{name}"
    torch.library.define(name, signature)
    torch.library.register_fake(name, outputs)

    def run(*args: Any) -> Any:
        out = outputs(*args)
        _kernel(launch)(*args, out)
        return out

    # Triton's interpreter computes on a CPU.
    torch.library.impl(name, ("cuda", "cpu"), run)
    dispatched = getattr(torch.ops.shardscale, name.partition("::")[2]).default

    def call(*args: Any) -> Any:
        return dispatched(*args) if torch._C._len_torch_dispatch_stack() else run(*args)

    return call


@cache
def _kernel(name: str) -> Callable[..., None]:
    from launcher.model import layer_kernels  # imports triton

    found: Callable[..., None] = getattr(layer_kernels, name)
    return found


def _norm_outputs(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.numel() // x.size(-1)
    rstds = x.new_empty(rows, dtype=torch.float32)
    means = x.new_empty(0 if bias is None else rows, dtype=torch.float32)
    return torch.empty_like(x), means, rstds


def _norm_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    means: Tensor,
    rstds: Tensor,
    centered: bool,
    added: Tensor | None,
) -> list[Tensor]:
    of_x = torch.empty_like(x)  # allocated in the order that a trace sees, of what is returned
    sums = x.new_empty(1 + centered, _PROGRAMS, weight.numel(), dtype=torch.float32)
    return [of_x, sums, *(torch.empty_like(weight) for _ in range(1 + centered))]


def _halved(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.size(-1) // 2)


_norm = _define(
    "norm",
    "(Tensor x, Tensor weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    _norm_outputs,
    "norm",
)
_norm_backward = _define(
    "norm_backward",
    "(Tensor grad, Tensor x, Tensor weight, Tensor means, Tensor rstds, bool centered, "
    "Tensor? added) -> Tensor[]",
    _norm_gradients,
    "norm_backward",
)
_swiglu = _define("swiglu", "(Tensor x) -> Tensor", _halved, "swiglu")
_swiglu_backward = _define(
    "swiglu_backward",
    "(Tensor grad, Tensor x) -> Tensor",
    lambda grad, x: torch.empty_like(x),
    "swiglu_backward",
)
_rotate = _define(
    "rotate_",
    "(Tensor(a!) x, Tensor cos, Tensor sin, bool back) -> Tensor(a!)",
    lambda x, cos, sin, back: x,
    "rotate",
)
