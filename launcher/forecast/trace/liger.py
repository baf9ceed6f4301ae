"""Liger's kernels in the blocks of transformers' decoders: what they keep and what they allocate.

As liger-kernel 0.8.5's ops/ (rms_norm.py, swiglu.py, rope.py) and its monkey_patch.py: a norm keeps
its input and one fp32 number per row, and in most families its gradient takes the place of its
output's; a gated MLP keeps gate and input, and their gradients take these's place; queries and keys
are turned in place. The loss is computed in chunks, as ours is.
"""

import sys
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from launcher.forecast.trace.counting import as_kernel
from launcher.forecast.trace.patched import patched

_ROTATES: Final = "apply_rotary_pos_emb"
# The gradient of a norm's output may be a residual's, too: `in_place=False`.
_NOT_IN_PLACE: Final = (
    *("Gemma2RMSNorm", "Gemma3RMSNorm", "Gemma4RMSNorm", "Olmo2RMSNorm", "Olmo3RMSNorm"),
    *("Glm4RMSNorm", "Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm", "Exaone4RMSNorm"),
)
_GATED: Final = ("gate_proj", "up_proj", "down_proj")


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, in_place: bool) -> Tensor:
        ctx.in_place = in_place

        def kernel() -> Tensor:
            ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
            return torch.empty_like(x)

        return as_kernel(kernel, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _, weight, _ = ctx.saved_tensors
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        return grad if ctx.in_place else torch.empty_like(grad), of_weight, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(gate, x)
        return as_kernel(lambda: torch.empty_like(gate), gate, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.saved_tensors


def liger_kernels(decoder: nn.Module) -> AbstractContextManager[None]:
    """Have the blocks of a decoder allocate as with Liger's kernels."""
    turning = set()
    for module in decoder.modules():
        theirs = sys.modules[type(module).__module__]
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_normed, module)
        elif all(hasattr(module, name) for name in _GATED):
            module.forward = partial(_gated, module)
        if hasattr(theirs, _ROTATES):
            turning.add(theirs)
    return patched(*((theirs, _ROTATES, lambda q, k, *_, **__: (q, k)) for theirs in turning))


def _normed(norm: Any, x: Tensor) -> Tensor:
    in_place = type(norm).__name__ not in _NOT_IN_PLACE
    out: Tensor = _Norm.apply(x, norm.weight, in_place)
    return out


def _gated(mlp: Any, x: Tensor) -> Tensor:
    out: Tensor = mlp.down_proj(_Gated.apply(mlp.gate_proj(x), mlp.up_proj(x)))
    return out
