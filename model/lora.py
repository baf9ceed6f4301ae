"""Low-rank adapters beside frozen projections (LoRA, arXiv:2106.09685), as PEFT has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launcher.model.config import ModelConfig
from launcher.model.lora_config import Lora, LoraTarget

ADAPTERS = ("lora_a", "lora_b")


class LoRALinear(nn.Linear):
    """W x + bias + scale B A x, of which only A and B are trained.

    Args:
        inner: width of x.
        sizes: rows of W, as many for each of the matrices that it is made of. Each has `rank` rows
            of A and its own rows of B.
        bias: whether there is one.
        lora: rank, scale and dropout.
    """

    def __init__(self, inner: int, sizes: Sequence[int], *, bias: bool, lora: Lora) -> None:
        super().__init__(inner, sum(sizes), bias=bias)
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


def linear(
    config: ModelConfig, target: LoraTarget, inner: int, *sizes: int, bias: bool
) -> nn.Linear:
    """A projection of a block, [*, inner] -> [*, sum(sizes)], with an adapter where it has one."""
    if config.lora is None or target not in config.lora.targets:
        return nn.Linear(inner, sum(sizes), bias=bias)
    return LoRALinear(inner, sizes, bias=bias, lora=config.lora)


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return name.rpartition(".")[2] in ADAPTERS


def freeze(module: nn.Module) -> None:
    """Train adapters alone."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(is_adapter(name))
