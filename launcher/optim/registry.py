"""One entry for each optimizer: how it is built, what it keeps, and what it can be sharded into."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import torch
from torch import nn

from launcher.optim import apollo, low_precision, muon
from launcher.optim.apollo import Apollo
from launcher.optim.choice import Moments, OptimChoice, OptimizerName, Task
from launcher.optim.costs import COUNTER_BYTES, Costs, fused_adam_costs
from launcher.optim.dtensor import is_dtensor
from launcher.optim.low_precision import MOMENTS, LowPrecisionAdamW
from launcher.optim.muon import new_muon
from launcher.optim.with_adamw import WithAdamW, is_hidden

Groups = list[dict[str, Any]]
Build = Callable[[nn.Module, OptimChoice], torch.optim.Optimizer]
_Names = Callable[[str, Sequence[int]], tuple[str, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerEntry:
    """What the rest of the program needs to know of an optimizer."""

    build: Build
    states: _Names
    """(name of a parameter, its shape) -> names of its states in a checkpoint."""
    costs: Callable[[str, Sequence[int], OptimChoice, str], Costs]
    """(name of a parameter, its shape, or that of the range of it that a rank holds, the choice,
    type of the device that updates it) -> what it takes. A range of several parameters has no name.
    """
    counters: _Names = lambda name, shape: ("step",)
    """(name of a parameter, its shape) -> scalars that it keeps for it."""
    elementwise: bool = True
    """Whether an element's update needs only its own gradient and states, so that any flat range
    of a parameter can be updated alone."""
    rates: Mapping[Task, float] = field(default_factory=dict)
    """Default learning rates where they have another scale than AdamW's."""
    rates_from: str = ""
    """Their source; or why AdamW's may not serve."""


def parameter_groups(
    module: nn.Module,
    weight_decay: float,
    only: Callable[[str, Sequence[int]], bool] = lambda name, shape: True,
) -> Groups:
    """Decay for matrices (and embeddings), none for biases and norms; of the parameters that are
    trained, and for which `only` (name, full shape) says so."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        # Under ZeRO-3 a parameter is empty between uses; its real shape is kept beside it.
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if parameter.requires_grad and only(
            name.removeprefix("module."), shape
        ):  # DistributedDataParallel's prefix
            (matrices if len(shape) >= 2 else vectors).append(parameter)
    groups: Groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(module: nn.Module, choice: OptimChoice) -> torch.optim.Optimizer:
    """The optimizer of `choice` over the (sharded) parameters of `module`."""
    return OPTIMIZERS[choice.optimizer].build(module, choice)


def states_of(choice: OptimChoice, name: str, shape: Sequence[int]) -> tuple[str, ...]:
    """Names of the states that `choice` keeps of a parameter."""
    if choice.optimizer == "sgd" and choice.momentum == 0:
        return ()
    return OPTIMIZERS[choice.optimizer].states(name, shape)


def checkpointed(
    choice: OptimChoice, shapes: Mapping[str, Sequence[int]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(names of the states, names of the counters) that a checkpoint has of parameters of these
    `shapes`, trained with `choice`."""
    entry = OPTIMIZERS[choice.optimizer]
    states = (states_of(choice, *named) for named in shapes.items())
    counters = (entry.counters(*named) for named in shapes.items())
    return tuple(dict.fromkeys(chain(*states))), tuple(dict.fromkeys(chain(*counters)))


def moments_type(choice: OptimChoice) -> Moments:
    """How both moments of AdamW are stored: fp32, bf16 or int8."""
    if choice.optimizer == "adamw8bit":
        return "int8"
    return choice.moments_dtype or ("fp32" if choice.keeps_fp32 else "bf16")


def _adam(module: nn.Module, choice: OptimChoice) -> torch.optim.Optimizer:
    groups = parameter_groups(module, choice.recipe().weight_decay)
    if not _is_torchs(choice):
        return LowPrecisionAdamW(
            groups,
            lr=choice.recipe().lr,
            betas=choice.betas,
            eps=choice.eps,
            weight_decay=choice.recipe().weight_decay,
            moments=moments_type(choice),
            compensation=choice.compensation,
        )
    kind = torch.optim.Adam if choice.optimizer == "adam" else torch.optim.AdamW
    # Fused: one kernel over all tensors, on GPUs and on CPUs.
    return kind(groups, lr=choice.recipe().lr, betas=choice.betas, eps=choice.eps, fused=True)


def _sgd(module: nn.Module, choice: OptimChoice) -> torch.optim.Optimizer:
    groups = parameter_groups(module, choice.recipe().weight_decay)
    # torch has no fused SGD for DTensors; foreach would hold a copy of all gradients at once.
    fused = not is_dtensor(groups[0]["params"][0])
    return torch.optim.SGD(
        groups, lr=choice.recipe().lr, momentum=choice.momentum, fused=fused, foreach=False
    )


def _adafactor(module: nn.Module, choice: OptimChoice) -> torch.optim.Optimizer:
    from launcher.optim.adafactor import Adafactor  # which imports DTensor

    return Adafactor(parameter_groups(module, choice.recipe().weight_decay), lr=choice.recipe().lr)


def _with_adamw(new_hidden: Callable[[Groups, OptimChoice], torch.optim.Optimizer]) -> Build:
    def build(module: nn.Module, choice: OptimChoice) -> torch.optim.Optimizer:
        hidden = parameter_groups(module, choice.recipe().weight_decay, is_hidden)
        rest = parameter_groups(
            module, choice.recipe().weight_decay, lambda *of: not is_hidden(*of)
        )
        return WithAdamW(new_hidden(hidden, choice), rest, choice)

    return build


def _is_torchs(choice: OptimChoice) -> bool:
    """Whether torch's own Adam serves, which knows fp32 only."""
    return moments_type(choice) == "fp32" and choice.keeps_fp32


def _adam_costs(_: str, shape: Sequence[int], choice: OptimChoice, device_type: str) -> Costs:
    elements = math.prod(shape)
    if _is_torchs(choice):
        return fused_adam_costs(elements)
    return low_precision.costs(
        elements,
        moments=moments_type(choice),
        bf16_weight=not choice.keeps_fp32,
        compensation=choice.compensation,
        on_gpu=device_type == "cuda",
    )


def _sgd_costs(_: str, shape: Sequence[int], choice: OptimChoice, __: str) -> Costs:
    elements = math.prod(shape)
    if choice.momentum:
        return Costs(states_bytes=(4 * elements,), update_bytes=20 * elements)
    return Costs(states_bytes=(), update_bytes=12 * elements)


def _adafactor_costs(_: str, shape: Sequence[int], __: OptimChoice, ___: str) -> Costs:
    """In fp32: 28 for squares, their means and the estimate, 28 for the update, 24 for root mean
    squares of update and weight, 28 to apply it. Held: the squared gradient or the update times its
    rate, the estimate and the update."""
    elements = math.prod(shape)
    kept = [elements]
    if len(shape) >= 2:  # of rows and of columns
        kept = [math.prod(shape[:-1]), math.prod((*shape[:-2], shape[-1]))]
    return Costs(
        states_bytes=(COUNTER_BYTES, *(4 * each for each in kept)),
        update_bytes=108 * elements,
        temporary_bytes=12 * elements,
    )


def _moments(_: str, __: Sequence[int]) -> tuple[str, ...]:
    return MOMENTS


def _momentum(_: str, __: Sequence[int]) -> tuple[str, ...]:
    return ("momentum_buffer",)


def _factors(_: str, shape: Sequence[int]) -> tuple[str, ...]:
    return ("row_var", "col_var") if len(shape) >= 2 else ("variance",)


def _of_hidden(states: tuple[str, ...], others: tuple[str, ...]) -> _Names:
    return lambda name, shape: states if is_hidden(name, shape) else others


_ADAM: Final = OptimizerEntry(build=_adam, states=_moments, costs=_adam_costs)
OPTIMIZERS: Final[Mapping[OptimizerName, OptimizerEntry]] = {
    "adamw": _ADAM,
    "adam": _ADAM,
    "sgd": OptimizerEntry(
        build=_sgd,
        states=_momentum,
        costs=_sgd_costs,
        counters=lambda name, shape: (),
        rates_from="found with AdamW: sgd has no usual rate for decoders, so try larger ones",
    ),
    "adafactor": OptimizerEntry(
        build=_adafactor,
        states=_factors,
        costs=_adafactor_costs,
        elementwise=False,
        rates={"training from scratch": 1e-2, "full fine-tuning": 1e-3, "LoRA": 1e-3},
        rates_from="T5's for all weights, arXiv:1910.10683",
    ),
    "adamw8bit": _ADAM,
    "muon": OptimizerEntry(
        build=_with_adamw(new_muon),
        states=_of_hidden(("momentum_buffer",), MOMENTS),
        costs=muon.costs,
        counters=_of_hidden((), ("step",)),
        elementwise=False,
    ),
    "apollo": OptimizerEntry(
        build=_with_adamw(Apollo),
        states=_of_hidden(apollo.STATES, MOMENTS),
        costs=apollo.costs,
        elementwise=False,
    ),
}
