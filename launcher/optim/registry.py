"""One entry for each optimizer: how it is built, what it keeps, and what it can be sharded into.

Nothing here imports torch until an optimizer is built: refusals and plans need only the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from launcher.optim.choice import Moments, OptimChoice, OptimizerName

if TYPE_CHECKING:
    import torch
    from torch import nn

Groups = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerEntry:
    """What the rest of the program needs to know of an optimizer."""

    build: Callable[[Groups, OptimChoice], torch.optim.Optimizer]
    states: tuple[str, ...]
    """Names of its states in a checkpoint; a parameter may have only some of them."""
    counters: tuple[str, ...]
    """Scalars that it keeps per parameter."""
    elementwise: bool
    """Whether an element's update needs only its own gradient and states, so that any flat range
    of a parameter can be updated alone."""
    state_bytes: Callable[[Sequence[int], OptimChoice], int]
    """(shape of a parameter, or of the range of it that a rank holds) -> bytes of its states,
    without the counters."""
    temporary_bytes: Callable[[Sequence[int], OptimChoice], int] = lambda _, __: 0
    """What its update of such a tensor holds at most beside them; nothing where it is fused."""


def parameter_groups(module: nn.Module, weight_decay: float) -> Groups:
    """Decay for matrices (and embeddings), none for biases and norms."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for parameter in module.parameters():
        # Under ZeRO-3 a parameter is empty between uses; its real shape is kept beside it.
        shape = getattr(parameter, "ds_shape", parameter.shape)
        (matrices if len(shape) >= 2 else vectors).append(parameter)
    groups: Groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(module: nn.Module, choice: OptimChoice) -> torch.optim.Optimizer:
    """The optimizer of `choice` over the (sharded) parameters of `module`."""
    groups = parameter_groups(module, choice.weight_decay)
    return OPTIMIZERS[choice.optimizer].build(groups, choice)


def checkpointed(choice: OptimChoice) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(names of the states, names of the counters) that a checkpoint of `choice` has."""
    entry = OPTIMIZERS[choice.optimizer]
    without = choice.optimizer == "sgd" and choice.momentum == 0
    return (() if without else entry.states), entry.counters


def moments_type(choice: OptimChoice) -> Moments:
    """How both moments of AdamW are stored: fp32, bf16 or int8."""
    if choice.optimizer == "adamw8bit":
        return "int8"
    return choice.moments_dtype or ("bf16" if choice.precision == "bf16-pure" else "fp32")


def _adamw(groups: Groups, choice: OptimChoice) -> torch.optim.Optimizer:
    if moments_type(choice) != "fp32" or choice.precision == "bf16-pure":
        return _low_precision(groups, choice)
    import torch

    # Fused: one kernel over all tensors, on GPUs and on CPUs.
    return torch.optim.AdamW(groups, lr=choice.lr, betas=choice.betas, eps=choice.eps, fused=True)


def _low_precision(groups: Groups, choice: OptimChoice) -> torch.optim.Optimizer:
    from launcher.optim.low_precision import LowPrecisionAdamW

    return LowPrecisionAdamW(
        groups,
        lr=choice.lr,
        betas=choice.betas,
        eps=choice.eps,
        weight_decay=choice.weight_decay,
        moments=moments_type(choice),
    )


def _adam(groups: Groups, choice: OptimChoice) -> torch.optim.Optimizer:
    import torch

    return torch.optim.Adam(groups, lr=choice.lr, betas=choice.betas, eps=choice.eps, fused=True)


def _sgd(groups: Groups, choice: OptimChoice) -> torch.optim.Optimizer:
    import torch

    from launcher.optim.dtensor import is_dtensor

    # torch has no fused SGD for DTensors; foreach would hold a copy of all gradients at once.
    fused = not is_dtensor(groups[0]["params"][0])
    return torch.optim.SGD(
        groups, lr=choice.lr, momentum=choice.momentum, fused=fused, foreach=False
    )


def _adafactor(groups: Groups, choice: OptimChoice) -> torch.optim.Optimizer:
    from launcher.optim.adafactor import Adafactor

    return Adafactor(groups, lr=choice.lr)


def _adamw_bytes(shape: Sequence[int], choice: OptimChoice) -> int:
    from launcher.optim.low_precision import state_bytes

    return state_bytes(
        math.prod(shape),
        moments=moments_type(choice),
        compensated=choice.precision == "bf16-pure",
    )


def _adamw_temporary_bytes(shape: Sequence[int], choice: OptimChoice) -> int:
    if moments_type(choice) == "fp32" and choice.precision != "bf16-pure":
        return 0
    from launcher.optim.low_precision import temporary_bytes

    return temporary_bytes(
        math.prod(shape),
        moments=moments_type(choice),
        compensated=choice.precision == "bf16-pure",
    )


def _adafactor_bytes(shape: Sequence[int], choice: OptimChoice) -> int:
    if len(shape) < 2:
        return 4 * math.prod(shape)
    return 4 * (math.prod(shape[:-1]) + math.prod((*shape[:-2], shape[-1])))


_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
OPTIMIZERS: Final[Mapping[OptimizerName, OptimizerEntry]] = {
    "adamw": OptimizerEntry(
        build=_adamw,
        states=_MOMENTS,
        counters=("step",),
        elementwise=True,
        state_bytes=_adamw_bytes,
        temporary_bytes=_adamw_temporary_bytes,
    ),
    "adam": OptimizerEntry(
        build=_adam,
        states=_MOMENTS,
        counters=("step",),
        elementwise=True,
        state_bytes=lambda shape, _: 8 * math.prod(shape),
    ),
    "sgd": OptimizerEntry(
        build=_sgd,
        states=("momentum_buffer",),
        counters=(),
        elementwise=True,
        state_bytes=lambda shape, choice: 4 * math.prod(shape) if choice.momentum else 0,
    ),
    "adafactor": OptimizerEntry(
        build=_adafactor,
        states=("row_var", "col_var", "variance"),
        counters=("step",),
        elementwise=False,
        state_bytes=_adafactor_bytes,
        # In fp32: the squared gradient or the update times its rate, the estimate and the update.
        temporary_bytes=lambda shape, _: 12 * math.prod(shape),
    ),
    "adamw8bit": OptimizerEntry(
        build=_low_precision,
        states=_MOMENTS,
        counters=("step",),
        elementwise=True,
        state_bytes=_adamw_bytes,
        temporary_bytes=_adamw_temporary_bytes,
    ),
}
