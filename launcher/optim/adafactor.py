"""Adafactor over whole parameters and FSDP's shards, without waiting for the device."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from launcher.optim.choice import OptimChoice
from launcher.optim.dtensor import is_dtensor
from launcher.optim.entry import COUNTER_BYTES, OptimizerCosts, OptimizerEntry, parameter_groups


class Adafactor(torch.optim.Adafactor):
    """torch's Adafactor (Shazeer & Stern 2018) with an update that works on sharded DTensors.

    torch's own fails on them (in-place squares of partial norms), and reads two norms per parameter
    back from the device. The column factor of a row-sharded matrix is a sum over all ranks: [1, n]
    floats are communicated per matrix, and a few scalars.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closures
        """Update every parameter that has a gradient, unless `found_inf` is set to 1."""
        assert closure is None
        if getattr(self, "found_inf", 0):
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        square = gradient.float().square()
        means = _means(square)
        if not state:
            state["step"] = torch.tensor(0.0)
            state.update({name: torch.zeros_like(mean) for name, mean in means.items()})
        state["step"] += 1
        step = state["step"].item()  # on the host
        for name, mean in means.items():
            state[name].lerp_(mean, step ** group["beta2_decay"])
        smallest, smallest_rms = group["eps"]
        smallest = torch.finfo(parameter.dtype).eps if smallest is None else smallest
        if "variance" in state:
            estimate = state["variance"].clone()
        else:
            row_mean = _summed(state["row_var"].sum(-2, keepdim=True) / parameter.shape[-2])
            estimate = state["row_var"] * state["col_var"] / row_mean.clamp(min=smallest)
        # squared, since the root follows: as in torch
        update = estimate.clamp_(min=smallest**2).rsqrt_().mul_(gradient)
        # relative to the weight's root mean square before its decay, as in torch
        rate = min(group["lr"], step**-0.5) * _rms(parameter).clamp(min=smallest_rms)
        # the paper's clipping: the update's root mean square is at most d
        rate = rate / (_rms(update) / group["d"]).clamp(min=1.0)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(update * rate)


def _is_factored(shape: Sequence[int]) -> bool:
    return len(shape) >= 2 and min(shape[-2:]) > 1  # the factors of one row are that row


def _means(square: Tensor) -> dict[str, Tensor]:
    if not _is_factored(square.shape):
        return {"variance": square}
    # Sums first: ranks hold different numbers of rows.
    return {
        "row_var": _summed(square.sum(-1, keepdim=True) / square.shape[-1]),
        "col_var": _summed(square.sum(-2, keepdim=True) / square.shape[-2]),
    }


def _rms(tensor: Tensor) -> Tensor:
    return _summed(tensor.float().square().sum() / tensor.numel()).sqrt()


def _summed(tensor: Tensor) -> Tensor:
    """Sum up what each rank has summed of its shard, where the sum was along what is divided."""
    if not is_dtensor(tensor) or not any(each.is_partial() for each in tensor.placements):
        return tensor
    from torch.distributed.tensor import Replicate

    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


def _build(module: nn.Module, choice: OptimChoice) -> torch.optim.Optimizer:
    return Adafactor(parameter_groups(module, choice.recipe().weight_decay), lr=choice.recipe().lr)


def _costs(_: str, shape: Sequence[int], __: OptimChoice, ___: str) -> OptimizerCosts:
    """Return the costs in fp32.

    Bytes per element: 28 for squares, their means and the estimate, 28 for the update, 24 for root
    mean squares of update and weight, 28 to apply it. Temporary: the squared gradient or the update
    times its rate, the estimate and the update.
    """
    elements = math.prod(shape)
    kept = [elements]
    if len(shape) >= 2:  # of rows and of columns
        kept = [math.prod(shape[:-1]), math.prod((*shape[:-2], shape[-1]))]
    return OptimizerCosts(
        states_bytes=(COUNTER_BYTES, *(4 * each for each in kept)),
        update_bytes=108 * elements,
        temporary_bytes=12 * elements,
    )


def _states(_: str, shape: Sequence[int]) -> tuple[str, ...]:
    return ("row_var", "col_var") if _is_factored(shape) else ("variance",)


ENTRY = OptimizerEntry(
    build=_build,
    states=_states,
    costs=_costs,
    elementwise=False,
    rates={"training from scratch": 1e-2, "full fine-tuning": 1e-3, "LoRA": 1e-3},
    rates_from="T5's for all weights, arXiv:1910.10683",
)
