"""Norms, activations and rotary embedding, each in the form that keeps and moves least memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from launcher.model import fused
from launcher.model.config import Activation, ModelConfig, RopeScaling
from launcher.model.derived import Compute, derived, sparing

# Norms. Autocast runs them in fp32: a copy of the input, which backward keeps, a copy of the output
# for the matmul behind it, and twice the bytes moved. The kernels sum in fp32 whatever the type.


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` without autocast's casts."""

    def forward(self, x: Tensor, *, beside: bool = False) -> Any:
        """x [..., d] -> [..., d]; x itself before it where that goes on `beside`."""
        shape = self.normalized_shape
        return normalized(x, shape, self.weight, self.bias, self.eps, beside=beside)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` without autocast's casts."""

    def forward(self, x: Tensor, *, beside: bool = False) -> Any:
        """x [..., d] -> [..., d]; x itself before it where that goes on `beside`."""
        assert self.eps is not None  # `norm` and `head_norm` give one
        return normalized(x, self.normalized_shape, self.weight, None, self.eps, beside=beside)


def normalized(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    beside: bool = False,
) -> Any:
    """x [..., *shape] in its own type, whatever that of weight and bias: a LayerNorm where there is
    a bias, an RMSNorm without. With `beside`, (x, norm), so that one kernel adds their gradients.
    """
    if fused.takes_norm(x):
        return fused.Norm.apply(x, weight, bias, eps, beside)
    with torch.autocast(x.device.type, enabled=False):
        if bias is None:
            y = F.rms_norm(x, list(shape), weight.to(x.dtype), eps)
        else:
            y = F.layer_norm(x, list(shape), weight.to(x.dtype), bias.to(x.dtype), eps)
    return (x, y) if beside else y


def norm(config: ModelConfig) -> nn.Module:
    """Make a norm of the residual stream, [..., d]."""
    kind = LayerNorm if config.norm == "layer" else RMSNorm
    return kind(config.d_model, eps=config.norm_eps)


def norm_beside(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the residual stream x [..., d], and its norm for what is added to it."""
    beside, normed = norm(x, beside=True)
    derived(normed, partial(norm, x))
    return beside, normed


def head_norm(config: ModelConfig) -> nn.Module:
    """Make a norm of queries or keys, [..., head_dim]; the identity where a family has none."""
    if not config.qk_norm:
        return nn.Identity()
    return RMSNorm(config.head_size, eps=config.norm_eps)


# Activations, between the two projections of an MLP.


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
        # Both halves are written where they belong, without a `cat`.
        grad_gate, grad_value = grad_x.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=grad_value)
        torch.ops.aten.silu_backward.grad_input(grad * value, gate, grad_input=grad_gate)
        return grad_x


def swiglu(x: Tensor) -> Tensor:
    """x [..., 2 f], the gate before what it multiplies -> [..., f]."""
    if torch.compiler.is_compiling():  # a compiler fuses the formula, and keeps what it wants
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value
    y: Tensor = (fused.SwiGLU if fused.takes(x) else _SwiGLU).apply(x)
    return y


ACTIVATIONS: Final[dict[Activation, Callable[[Tensor], Tensor]]] = {
    "gelu": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "swiglu": swiglu,
}

_KEEP_THEIR_INPUT: Final[frozenset[Activation]] = frozenset({"gelu", "swiglu"})
"""Activations whose backward reads their input; ReLU's reads its output, which the next projection
saves as well."""


def keeping(
    config: ModelConfig,
) -> Callable[[Tensor, Compute], contextlib.AbstractContextManager[object]]:
    """(result, compute) -> a context in which autograd does not save the `result` of an activation;
    backward recomputes it with compute(): the widest tensor of a block, for one kernel more.

    Without effect where checkpointing decides what is kept, where the activation does not keep its
    source anyway, and in compiled blocks, whose compiler recomputes by itself.
    """
    if config.activation not in _KEEP_THEIR_INPUT:
        return lambda *_: contextlib.nullcontext()
    checkpointed = config.activation_checkpointing != "none" or config.mlp_tile is not None
    return _noting if checkpointed else _sparing


def _noting(result: Tensor, compute: Compute) -> contextlib.AbstractContextManager[object]:
    derived(result, compute)
    return contextlib.nullcontext()


def _sparing(result: Tensor, compute: Compute) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if torch.compiler.is_compiling() else sparing(result, compute)


# Rotary position embedding (RoFormer, arXiv:2104.09864), and its scaled form of Llama 3.

Rotation = tuple[Tensor, Tensor]
"""cos and sin [T, 1, head_dim / 2] of the angle that each position turns each pair by, in fp32."""


def rotation(config: ModelConfig, positions: Tensor) -> Rotation:
    """One table for all blocks; positions [T] int64, on the device of the model."""
    # In fp32 whatever the model's type: bf16 cannot tell positions above 256 apart.
    even = torch.arange(0, config.head_size, 2, device=positions.device, dtype=torch.float32)
    frequency = 1.0 / config.rope_theta ** (even / config.head_size)
    if config.rope_scaling is not None:
        frequency = _stretched(frequency, config.rope_scaling)
    angle = positions.float()[:, None, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """x [B, T, H, head_dim] with each pair (i, i + head_dim / 2) turned, computed in fp32; it may
    be turned where it is."""
    cos, sin = rotation
    if fused.takes(x):
        y: Tensor = fused.Rotate.apply(x.flatten(0, 1).flatten(1), cos, sin, x.size(2))
        return y.view(x.shape)
    left, right = x.float().chunk(2, dim=-1)
    turned = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
    return turned.to(x.dtype)


def compared(x: Tensor, norm: nn.Module, rotation: Rotation | None) -> Tensor:
    """Queries or keys [B, T, H, head_dim] as they are compared: normed and rotated."""

    def compute() -> Tensor:
        y: Tensor = norm(x)
        return y if rotation is None else rotate(y, rotation)

    y = compute()
    if y is not x:
        derived(y, compute)
    return y


def _stretched(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    """Wavelengths that the original context holds few of are lengthened by the factor, short ones
    kept, those between blended (`rope_type` llama3 of transformers' modeling_rope_utils)."""
    factor, low, high, original = scaling
    turns = original * frequency / (2 * math.pi)  # in the original context
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequency + (1.0 - kept) * frequency / factor
