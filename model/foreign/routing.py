"""Tokens per expert of a mixture of experts, counted on the device while it trains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

_EXPERTS = "Experts"
"""End of the names of modules of transformers that hold a block's experts."""


class Routing:
    """Counts the tokens that each expert of each block is sent; needs no synchronisation.

    A block that is recomputed counts its tokens twice, which changes no share of them.
    """

    def __init__(self, experts: Sequence[nn.Module]) -> None:
        self._shape = len(experts), int(getattr(experts[0], "num_experts"))  # noqa: B009
        self._counts: Tensor | None = None
        for row, module in enumerate(experts):
            module.register_forward_pre_hook(partial(self._count, row), with_kwargs=True)

    @classmethod
    def of(cls, module: nn.Module) -> Self | None:
        """Follow the experts of a module; None if it has none."""
        found = [m for m in module.modules() if type(m).__name__.endswith(_EXPERTS)]
        sizes = {getattr(m, "num_experts", None) for m in found}
        return cls(found) if len(sizes) == 1 and None not in sizes else None

    def take(self) -> Tensor | None:
        """Return the counts [blocks, experts] since the last call."""
        taken, self._counts = self._counts, None
        return taken

    @torch.no_grad()
    def _count(self, row: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not module.training:
            return
        chosen = next(
            value
            for value in (*args, *kwargs.values())
            if isinstance(value, Tensor) and value.dtype == torch.int64
        )
        if self._counts is None:
            self._counts = torch.zeros(self._shape, device=chosen.device)
        one = self._counts.new_ones(()).expand(chosen.numel())
        self._counts[row].scatter_add_(0, chosen.flatten(), one)


def load_of(counts: Tensor) -> Tensor:
    """Return [3]: tokens of the expert with fewest and of that with most, of any block, over an
    equal share; and the entropy of the shares over its maximum, as a mean over blocks."""
    shares = counts / counts.sum(dim=1, keepdim=True)
    experts = counts.size(1)
    entropy = torch.special.entr(shares).sum(dim=1).mean() / math.log(max(2, experts))
    return torch.stack([shares.min() * experts, shares.max() * experts, entropy])
