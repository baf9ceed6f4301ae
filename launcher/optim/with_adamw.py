"""Another optimizer for the matrices of blocks, AdamW for everything else, as one optimizer."""

from collections.abc import Sequence
from typing import Any

import torch

from launcher.model.parts import block_of
from launcher.optim.choice import OptimChoice


class WithAdamW(torch.optim.Optimizer):
    """`hidden` and an AdamW over `rest`, which write into one `state` and step over one list of
    `param_groups`.

    Args:
        hidden: an optimizer of two-dimensional parameters.
        rest: groups of all others: embeddings, the head, biases and norms. None where only
            adapters are trained.
        choice: learning rate, betas and epsilon.
    """

    def __init__(
        self, hidden: torch.optim.Optimizer, rest: list[dict[str, Any]], choice: OptimChoice
    ) -> None:
        lr = choice.recipe().lr
        super().__init__([*hidden.param_groups, *rest], {"lr": lr})
        self._parts: list[Any] = [hidden]
        if rest:
            options: dict[str, Any] = {"lr": lr, "betas": choice.betas, "eps": choice.eps}
            self._parts.append(torch.optim.AdamW(rest, **options, fused=True))
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closures
        """Update every parameter that has a gradient, unless `found_inf` is set to 1."""
        assert closure is None
        if not getattr(self, "found_inf", 0):
            for part in self._parts:
                part.step()


def is_hidden(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter is a matrix of a block."""
    return block_of(name) is not None and len(shape) == 2
