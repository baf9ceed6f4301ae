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

COUNTER_BYTES = 4
"""torch counts an optimizer's steps in one fp32 scalar per tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerEntry:
    """What the rest of the program needs to know of an optimizer."""

    build: Callable[[nn.Module, OptimChoice], torch.optim.Optimizer]
    states: tuple[str, ...]
    """Names of its states in a checkpoint; a parameter may have only some of them."""
    counters: tuple[str, ...]
    """Scalars that it keeps per parameter."""
    elementwise: bool
    """Whether an element's update needs only its own gradient and states, so that any flat range
    of a parameter can be updated alone."""
    state_bytes: Callable[[str, Sequence[int], OptimChoice], int]
    """(name of a parameter, its shape, or that of the range of it that a rank holds) -> bytes of
    its states and counters. A range of several parameters has no name."""
    temporary_bytes: Callable[[str, Sequence[int], OptimChoice], int] = lambda _, __, ___: 0
    """What its update of such a tensor holds at most beside them; nothing where it is fused."""


def parameter_groups(
    module: nn.Module,
    weight_decay: float,
    only: Callable[[str, Sequence[int]], bool] = lambda name, shape: True,
) -> Groups:
    """Decay for matrices (and embeddings), none for biases and norms; of the parameters for which
    `only` (name, full shape) says so."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        # Under ZeRO-3 a parameter is empty between uses; its real shape is kept beside it.
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if only(name.removeprefix("module."), shape):  # DistributedDataParallel's prefix
            (matrices if len(shape) >= 2 else vectors).append(parameter)
    groups: Groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(module: nn.Module, choice: OptimChoice) -> torch.optim.Optimizer:
    """The optimizer of `choice` over the (sharded) parameters of `module`."""
    return OPTIMIZERS[choice.optimizer].build(module, choice)


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


def _adamw(module: nn.Module, choice: OptimChoice) -> torch.optim.Optimizer:
    if not _is_torchs(choice):
        return _low_precision(module, choice)
    import torch

    groups = parameter_groups(module, choice.weight_decay)
    # Fused: one kernel over all tensors, on GPUs and on CPUs.
    return torch.optim.AdamW(groups, lr=choice.lr, betas=choice.betas, eps=choice.eps, fused=True)


def _low_precision(module: nn.Module, choice: OptimChoice) -> torch.optim.Optimizer:
    from launcher.optim.low_precision import LowPrecisionAdamW

    return LowPrecisionAdamW(
        parameter_groups(module, choice.weight_decay),
        lr=choice.lr,
        betas=choice.betas,
        eps=choice.eps,
        weight_decay=choice.weight_decay,
        moments=moments_type(choice),
    )


def _adam(module: nn.Module, choice: OptimChoice) -> torch.optim.Optimizer:
    import torch

    groups = parameter_groups(module, choice.weight_decay)
    return torch.optim.Adam(groups, lr=choice.lr, betas=choice.betas, eps=choice.eps, fused=True)


def _sgd(module: nn.Module, choice: OptimChoice) -> torch.optim.Optimizer:
    import torch

    from launcher.optim.dtensor import is_dtensor

    groups = parameter_groups(module, choice.weight_decay)
    # torch has no fused SGD for DTensors; foreach would hold a copy of all gradients at once.
    fused = not is_dtensor(groups[0]["params"][0])
    return torch.optim.SGD(
        groups, lr=choice.lr, momentum=choice.momentum, fused=fused, foreach=False
    )


def _adafactor(module: nn.Module, choice: OptimChoice) -> torch.optim.Optimizer:
    from launcher.optim.adafactor import Adafactor

    return Adafactor(parameter_groups(module, choice.weight_decay), lr=choice.lr)


def _muon(module: nn.Module, choice: OptimChoice) -> torch.optim.Optimizer:
    from launcher.optim.muon import MuonWithAdamW, is_hidden

    hidden = parameter_groups(module, choice.weight_decay, is_hidden)
    rest = parameter_groups(module, choice.weight_decay, lambda *of: not is_hidden(*of))
    return MuonWithAdamW(hidden, rest, choice)


def _is_torchs(choice: OptimChoice) -> bool:
    """Whether torch's own AdamW serves, which knows fp32 only."""
    return moments_type(choice) == "fp32" and choice.precision != "bf16-pure"


def _adamw_bytes(_: str, shape: Sequence[int], choice: OptimChoice) -> int:
    from launcher.optim.low_precision import state_bytes

    states = state_bytes(
        math.prod(shape),
        moments=moments_type(choice),
        compensated=choice.precision == "bf16-pure",
    )
    return states + (COUNTER_BYTES if _is_torchs(choice) else 0)  # ours is a Python integer


def _adamw_temporary_bytes(_: str, shape: Sequence[int], choice: OptimChoice) -> int:
    if _is_torchs(choice):
        return 0
    from launcher.optim.low_precision import temporary_bytes

    return temporary_bytes(
        math.prod(shape),
        moments=moments_type(choice),
        compensated=choice.precision == "bf16-pure",
    )


def _adafactor_bytes(_: str, shape: Sequence[int], choice: OptimChoice) -> int:
    if len(shape) < 2:
        return COUNTER_BYTES + 4 * math.prod(shape)
    return COUNTER_BYTES + 4 * (math.prod(shape[:-1]) + math.prod((*shape[:-2], shape[-1])))


def _muon_bytes(name: str, shape: Sequence[int], _: OptimChoice) -> int:
    from launcher.optim.muon import is_hidden, state_bytes

    counter = 0 if is_hidden(name, shape) else COUNTER_BYTES
    return counter + state_bytes(name, shape)


def _muon_temporary_bytes(name: str, shape: Sequence[int], _: OptimChoice) -> int:
    from launcher.optim.muon import temporary_bytes

    return temporary_bytes(name, shape)


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
        state_bytes=lambda _, shape, __: COUNTER_BYTES + 8 * math.prod(shape),
    ),
    "sgd": OptimizerEntry(
        build=_sgd,
        states=("momentum_buffer",),
        counters=(),
        elementwise=True,
        state_bytes=lambda _, shape, choice: 4 * math.prod(shape) if choice.momentum else 0,
    ),
    "adafactor": OptimizerEntry(
        build=_adafactor,
        states=("row_var", "col_var", "variance"),
        counters=("step",),
        elementwise=False,
        state_bytes=_adafactor_bytes,
        # In fp32: the squared gradient or the update times its rate, the estimate and the update.
        temporary_bytes=lambda _, shape, __: 12 * math.prod(shape),
    ),
    "adamw8bit": OptimizerEntry(
        build=_low_precision,
        states=_MOMENTS,
        counters=("step",),
        elementwise=True,
        state_bytes=_adamw_bytes,
        temporary_bytes=_adamw_temporary_bytes,
    ),
    "muon": OptimizerEntry(
        build=_muon,
        states=("momentum_buffer", *_MOMENTS),
        counters=("step",),
        elementwise=False,
        state_bytes=_muon_bytes,
        temporary_bytes=_muon_temporary_bytes,
    ),
}
