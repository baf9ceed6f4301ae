"""Fused RMSNorms for decoders of transformers on a GPU.

Transformers composes each of five operators in fp32, whose intermediate results are all saved.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, Final

import torch
from torch import Tensor, nn

from launcher.model import fused
from launcher.model.layers import normalized

_NAME: Final = "RMSNorm"
"""In the names of their classes."""
_EPS: Final = ("variance_epsilon", "eps")
"""Names of what they add to the mean square."""
_WIDTH: Final = 8
_TOLERANCE: Final = 1e-5

_fused: dict[type[nn.Module], type[nn.Module] | None] = {}
"""Class of transformers -> the same with our forward; None where that is not an RMSNorm's."""


def fuse_norms(causal: nn.Module) -> None:
    """Run each RMSNorm of a model as one kernel where `fused.takes_norm`; elsewhere unchanged."""
    for module in causal.modules():
        norm = type(module)
        if norm not in _fused:
            form = _form_of(module)
            _fused[norm] = None if form is None else _with_formula(norm, *form)
        module.__class__ = _fused[norm] or norm


@torch.no_grad()
def _form_of(module: nn.Module) -> tuple[str, float, bool] | None:
    """Return the arguments of `_with_formula` with which a norm's own forward agrees on numbers;
    None where none do."""
    if _NAME not in type(module).__name__ or [*module._parameters] != ["weight"]:
        return None
    names = [name for name in _EPS if isinstance(getattr(module, name, None), float)]
    arguments = inspect.signature(module.forward).parameters
    if len(names) != 1 or len(arguments) != 1 or module._modules or module._buffers:
        return None
    probe = copy.copy(module)
    # No weight of all ones, so that one with an offset of 1 (Gemma's) differs.
    weight = nn.Parameter(torch.linspace(0.5, 1.5, _WIDTH, device="cpu"))
    probe.__dict__["_parameters"] = {"weight": weight}
    x = torch.linspace(-2.0, 3.0, 2 * _WIDTH, device="cpu").view(2, _WIDTH)
    unit = x * (x.square().mean(-1, keepdim=True) + getattr(module, names[0])).rsqrt()
    try:
        result = probe(x)
    except RuntimeError:  # of another width than its own
        return None
    for offset in (0.0, 1.0):
        if torch.allclose(result, unit * (weight + offset), rtol=_TOLERANCE, atol=_TOLERANCE):
            keeps_type = probe(x.bfloat16()).dtype is torch.bfloat16
            return names[0], offset, keeps_type
    return None


def _with_formula(
    norm: type[nn.Module], eps: str, offset: float, keeps_type: bool
) -> type[nn.Module]:
    """Derive a class of norms whose forward is one kernel.

    Args:
        eps: name of what is added to the mean square.
        offset: added to the weight; 1 in Gemma's.
        keeps_type: the result has the type of its input; else that of its product with the weight.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        if not fused.takes_norm(x):
            unfused: Tensor = norm.forward(self, x)
            return unfused
        weight = self.weight + offset if offset else self.weight
        y: Tensor = normalized(x, weight.shape, weight, None, getattr(self, eps))
        return y if keeps_type else y.to(torch.promote_types(x.dtype, weight.dtype))

    return type(norm.__name__, (norm,), {"forward": forward, "__module__": norm.__module__})
