"""Low-rank adapters beside frozen projections (LoRA, arXiv:2106.09685), as PEFT has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launcher.model.config import ModelConfig
from launcher.model.lora_config import Lora, LoraTarget
from launcher.model.quantized import QuantizedLinear

ADAPTERS = ("lora_a", "lora_b")


class _Adapter(nn.Module):
    """Adds scale B A x to what the projection that it is mixed into gives for x.

    Args:
        inner: width of x.
        sizes: rows of W, as many for each of the matrices that it is made of. Each has `rank` rows
            of A and its own rows of B.
        lora: rank, scale and dropout.
        options: the projection's own.
    """

    def __init__(self, inner: int, sizes: Sequence[int], *, lora: Lora, **options: Any) -> None:
        super().__init__(inner, sum(sizes), **options)
        self.sizes = list(sizes)
        self.scale = lora.scale
        self.dropout = nn.Dropout(lora.dropout)
        self.lora_a = nn.Parameter(torch.empty(len(sizes) * lora.rank, inner))
        self.lora_b = nn.Parameter(torch.zeros(sum(sizes), lora.rank))

    def forward(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]."""
        low = F.linear(self.dropout(x), self.lora_a)
        # Small against the products: one matrix of blocks, where each has its own rows of A.
        b = torch.block_diag(*self.lora_b.split(self.sizes)) if self.sizes[1:] else self.lora_b
        return torch.addmm(super().forward(x), low, b.t(), alpha=self.scale)


class LoRALinear(_Adapter, nn.Linear):
    """W x + bias + scale B A x, of which only A and B are trained."""


class QuantizedLoRALinear(_Adapter, QuantizedLinear):
    """The same of a quantised W."""


def linear(
    config: ModelConfig, target: LoraTarget, inner: int, *sizes: int, bias: bool
) -> nn.Module:
    """A projection of a block, [*, inner] -> [*, sum(sizes)], with an adapter where it has one."""
    quantized: dict[str, Any] = {"bias": bias}
    if config.quantize_base != "none":
        quantized["kind"] = config.quantize_base
    if config.lora is not None and target in config.lora.targets:
        kind = QuantizedLoRALinear if "kind" in quantized else LoRALinear
        return kind(inner, sizes, lora=config.lora, **quantized)
    plain = QuantizedLinear if "kind" in quantized else nn.Linear
    return plain(inner, sum(sizes), **quantized)


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return name.rpartition(".")[2] in ADAPTERS


def freeze(module: nn.Module) -> None:
    """Train adapters alone."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(is_adapter(name))
