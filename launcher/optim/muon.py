"""torch's Muon for the matrices of blocks."""

import functools
import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from launcher.optim.choice import OptimChoice
from launcher.optim.dtensor import is_dtensor
from launcher.optim.entry import (
    MOMENTS,
    OptimizerCosts,
    OptimizerEntry,
    fused_adam_costs,
    is_hidden,
    of_hidden,
    with_adamw,
)


@functools.cache
def _keep_sharding() -> None:
    """Have torch's Muon shard an update as its gradient is: with fewer rows than ranks, as adapters
    and routers have, each rank has all of it, which torch adds to no shard."""
    its: Any = importlib.import_module("torch.optim._muon")
    original = its._zeropower_via_newtonschulz

    def zeropower(update: Tensor, *options: Any) -> Tensor:
        found: Any = original(update, *options)
        if is_dtensor(update):
            found = found.redistribute(placements=update.placements)
        whole_or_shard: Tensor = found
        return whole_or_shard

    its._zeropower_via_newtonschulz = zeropower


def _new_muon(hidden: list[dict[str, Any]], choice: OptimChoice) -> torch.optim.Optimizer:
    # It orthogonalises the update of a matrix (Jordan, kellerjordan.github.io/posts/muon), at a
    # scale that lets it share AdamW's learning rate (Liu et al., arXiv:2502.16982).
    _keep_sharding()
    return torch.optim.Muon(hidden, lr=choice.recipe().lr, adjust_lr_fn="match_rms_adamw")


def _costs(name: str, shape: Sequence[int], _: OptimChoice, __: str) -> OptimizerCosts:
    """Return the costs of Muon (torch/optim/_muon.py) for a block's matrix, else of AdamW.

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
    return OptimizerCosts(
        states_bytes=(4 * elements,),
        update_bytes=54 * elements,
        update_flops=5 * (4 * m * m * n + 2 * m**3),
        temporary_bytes=8 * elements + 4 * m**2,
    )


ENTRY = OptimizerEntry(
    build=with_adamw(_new_muon),
    states=of_hidden(("momentum_buffer",), MOMENTS),
    costs=_costs,
    counters=of_hidden((), ("step",)),
    elementwise=False,
)
