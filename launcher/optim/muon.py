"""torch's Muon for the matrices of blocks, AdamW for everything else, as one optimizer."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from launcher.optim.choice import OptimChoice
from launcher.optim.costs import Costs, fused_adam_costs


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
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closures
        """Update every parameter that has a gradient, unless `found_inf` is set to 1."""
        assert closure is None
        if not getattr(self, "found_inf", 0):
            for part in self._parts:
                part.step()


def is_hidden(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon updates a parameter: a matrix of a block."""
    return name.startswith("blocks.") and len(shape) == 2


def costs(name: str, shape: Sequence[int], _: OptimChoice, __: str) -> Costs:
    """Muon's or AdamW's (torch/optim/_muon.py).

    Muon keeps one momentum in fp32. Besides the matmuls its kernels read and write per element:
    momentum and its Nesterov step 24, to bf16 and normalised 12, decay and update 18. Newton-Schulz
    has for X of [m, n], m <= n, in each of 5 iterations the products X X^T and B X of 2 m^2 n FLOPs
    and A A of 2 m^3 (Jordan, "Runtime analysis"). It holds the update in fp32; in bf16 it, the next
    one, and two products with itself.
    """
    elements = math.prod(shape)
    if not is_hidden(name, shape):
        return fused_adam_costs(elements)
    m, n = sorted(shape)
    return Costs(
        state_bytes=4 * elements,
        update_bytes=54 * elements,
        update_flops=5 * (4 * m * m * n + 2 * m**3),
        temporary_bytes=8 * elements + 4 * m**2,
    )
