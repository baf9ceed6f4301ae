"""LayerNorm and RMSNorm in the type of what they normalise.

Autocast runs norms in fp32: a copy of the input, which backward keeps, a copy of the output for the
matmul behind it, and twice the bytes moved. The kernels sum in fp32 whatever the type.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launcher.model.config import ModelConfig


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` without autocast's casts."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d] -> [..., d]."""
        return normalized(x, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` without autocast's casts."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d] -> [..., d]."""
        assert self.eps is not None  # `norm` and `head_norm` give one
        return normalized(x, self.normalized_shape, self.weight, None, self.eps)


def normalized(
    x: Tensor, shape: Sequence[int], weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """x [..., *shape] in its own type, whatever that of weight and bias: a LayerNorm where there is
    a bias, an RMSNorm without."""
    with torch.autocast(x.device.type, enabled=False):
        if bias is None:
            return F.rms_norm(x, list(shape), weight.to(x.dtype), eps)
        return F.layer_norm(x, list(shape), weight.to(x.dtype), bias.to(x.dtype), eps)


def norm(config: ModelConfig) -> nn.Module:
    """Of rows of the residual stream, [..., d]."""
    kind = LayerNorm if config.norm == "layer" else RMSNorm
    return kind(config.d_model, eps=config.norm_eps)


def head_norm(config: ModelConfig) -> nn.Module:
    """Of queries or keys, [..., head_dim]; the identity where a family has none."""
    if not config.qk_norm:
        return nn.Identity()
    return RMSNorm(config.head_size, eps=config.norm_eps)
