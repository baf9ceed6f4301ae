"""torch's Muon for the matrices of blocks, AdamW for everything else, as one optimizer."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from launcher.optim.choice import OptimChoice


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon orthogonalises the update of a hidden matrix; embeddings, the head, biases and norms are
    AdamW's (Jordan, kellerjordan.github.io/posts/muon; Liu et al., arXiv:2502.16982, whose scale of
    the update lets both share one learning rate).

    Both write into one `state` and step over one list of `param_groups`.

    Args:
        hidden: groups of two-dimensional parameters.
        rest: groups of all others.
        choice: learning rate, betas and epsilon.
    """

    def __init__(
        self, hidden: list[dict[str, Any]], rest: list[dict[str, Any]], choice: OptimChoice
    ) -> None:
        super().__init__([*hidden, *rest], {"lr": choice.lr})
        self._parts: tuple[Any, ...] = (
            torch.optim.Muon(hidden, lr=choice.lr, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=choice.lr, betas=choice.betas, eps=choice.eps, fused=True),
        )
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, unless `found_inf` is set to 1."""
        assert closure is None
        if not getattr(self, "found_inf", 0):
            for part in self._parts:
                part.step()


def is_hidden(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon updates a parameter: a matrix of a block."""
    return name.startswith("blocks.") and len(shape) == 2


def state_bytes(name: str, shape: Sequence[int]) -> int:
    """One momentum in fp32, or AdamW's two moments."""
    return (4 if is_hidden(name, shape) else 8) * math.prod(shape)


def temporary_bytes(name: str, shape: Sequence[int]) -> int:
    """The update in fp32; in bf16 it, the next one, and two products with itself
    (torch/optim/_muon.py)."""
    if not is_hidden(name, shape):
        return 0
    return 8 * math.prod(shape) + 4 * min(shape) ** 2
