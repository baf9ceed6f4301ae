"""APOLLO: AdamW's step sizes per row of a matrix, from a gradient that is projected to few columns.

Zhu et al., "APOLLO: SGD-like Memory, AdamW-level Performance" (2024, arXiv:2412.05270).
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from launcher.optim.choice import OptimChoice
from launcher.optim.dtensor import is_dtensor, local_part
from launcher.optim.entry import (
    MOMENTS,
    OptimizerCosts,
    OptimizerEntry,
    fused_adam_costs,
    is_hidden,
    of_hidden,
    with_adamw,
)

DEFAULT_RANK: Final = 64
REFRESH_STEPS: Final = 200
"""Steps between new projections, as in the paper; moments are kept."""
STATES: Final = ("projected_exp_avg", "projected_exp_avg_sq")
_SMALLEST_NORM: Final = 1e-12  # a row may have no gradient
_MASK: Final = 2**32 - 1


class Apollo(torch.optim.Optimizer):
    """Track AdamW's moments of G P, for a gradient G [m, n] and a random P [n, rank], and scale
    each row of G by the length that AdamW gives that of G P: |update| / |G P| sqrt(n / rank).

    The root is the paper's: AdamW's steps are all near 1, and the norm of `rank` of them is so much
    less than that of n. With it a step is as long as AdamW's at the same learning rate; the best
    rate is a larger one, the paper's 1e-2. P is always on the right, so that a row is updated by
    itself, wherever FSDP has put it: nothing is communicated. The paper projects the shorter side,
    which may be the left one, and bounds how fast the norm of a whole update grows; that would be a
    collective per matrix, and --clip bounds gradients instead.

    Args:
        params: as for any torch optimizer; two-dimensional, in fp32.
        choice: learning rate, betas, epsilon and rank.
    """

    def __init__(self, params: list[dict[str, Any]], choice: OptimChoice) -> None:
        super().__init__(
            params, {"lr": choice.recipe().lr, "betas": choice.betas, "eps": choice.eps}
        )
        self._rank = rank_of(choice)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closures
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, whole: Tensor, group: dict[str, Any]) -> None:
        weight, gradient = local_part(parameter), local_part(whole)
        state, columns = self.state[parameter], weight.shape[1]
        if not state:
            state["step"] = 0
            state.update({kind: _empty_rows(parameter, self._rank) for kind in STATES})
        state["step"] += 1
        step, (beta1, beta2) = state["step"], group["betas"]
        seed = (step - 1) // REFRESH_STEPS
        projected = gradient @ projection(columns, self._rank, seed, weight.device)
        first, second = (local_part(state[kind]) for kind in STATES)
        first.lerp_(projected, 1 - beta1)
        second.mul_(beta2).addcmul_(projected, projected, value=1 - beta2)
        # AdamW's step without the first moment's bias correction, which `factor` adds once per row
        update = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        torch.div(first, update, out=update)
        factor = _row_norms(update) / _row_norms(projected).add_(_SMALLEST_NORM)
        factor *= math.sqrt(columns / self._rank) / (1 - beta1**step)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.addcmul_(gradient, factor, value=-group["lr"])


def rank_of(choice: OptimChoice) -> int:
    """Return the columns of a projected gradient."""
    return DEFAULT_RANK if choice.apollo_rank is None else choice.apollo_rank


def projection(columns: int, rank: int, seed: int, device: torch.device) -> Tensor:
    """Return fp32 [columns, rank] of 1 / sqrt(rank) with random signs, which preserve the norm of a
    row on average, as normal numbers do (Achlioptas 2003).

    The signs are an integer hash of their position (C. Wellons' lowbias32): every rank, device and
    resumed run computes the same ones.
    """
    count = columns * rank
    bits = torch.arange(seed * count, (seed + 1) * count, device=device).bitwise_and_(_MASK)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits ^= bits >> shift
        bits *= factor  # of which the low 32 bits count, also where it overflows
        bits &= _MASK
    bits >>= 31  # the sign; lowbias32's last xor-shift would leave this bit as it is
    size = rank**-0.5
    return bits.to(torch.float32).mul_(2 * size).sub_(size).view(columns, rank)


def _costs(name: str, shape: Sequence[int], choice: OptimChoice, _: str) -> OptimizerCosts:
    """Return the costs of APOLLO for a block's matrix, else of AdamW.

    Its kernels read and write per element of a matrix 20 bytes, of a projected one 76, and of the
    projection 212. Held are at most the projection's 64-bit numbers twice, or it in fp32 beside the
    projected gradient, or that and the update.
    """
    elements = math.prod(shape)
    if not is_hidden(name, shape):
        return fused_adam_costs(elements)
    rank = rank_of(choice)
    projected, projecting = shape[0] * rank, shape[1] * rank
    return OptimizerCosts(
        states_bytes=(4 * projected, 4 * projected),
        update_bytes=20 * elements + 76 * projected + 212 * projecting,
        update_fp32_flops=2 * elements * rank,
        temporary_bytes=max(16 * projecting, 4 * (projecting + projected), 8 * projected),
    )


def _empty_rows(parameter: Tensor, columns: int) -> Tensor:
    # Zeros with another number of columns, whose rows are sharded like the parameter's.
    here = local_part(parameter)
    rows = here.new_zeros(here.shape[0], columns)
    if not is_dtensor(parameter):
        return rows
    from torch.distributed.tensor import DTensor

    sharded = DTensor.from_local(
        rows,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size((parameter.shape[0], columns)),
        stride=(columns, 1),
    )
    sharded._local_tensor = rows  # `from_local` has moved an offloaded parameter's to the GPU
    return sharded


def _row_norms(matrix: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(matrix, dim=1, keepdim=True)
    return norms


ENTRY = OptimizerEntry(
    build=with_adamw(Apollo), states=of_hidden(STATES, MOMENTS), costs=_costs, elementwise=False
)
