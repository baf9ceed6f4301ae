"""The optimizers by name, and what they keep of a model."""

import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import chain
from typing import Any, Final

import torch
from torch import nn

from launcher.optim.choice import Moments, OptimChoice, OptimizerName
from launcher.optim.dtensor import is_dtensor
from launcher.optim.entry import (
    MOMENTS,
    OptimizerCosts,
    OptimizerEntry,
    fused_adam_costs,
    parameter_groups,
)


def build_optimizer(module: nn.Module, choice: OptimChoice) -> torch.optim.Optimizer:
    """Build the optimizer of `choice` over the (sharded) parameters of `module`."""
    return OPTIMIZERS[choice.optimizer].build(module, choice)


def states_of(choice: OptimChoice, name: str, shape: Sequence[int]) -> tuple[str, ...]:
    """Return the names of the states that `choice` keeps of a parameter."""
    if choice.optimizer == "sgd" and choice.momentum == 0:
        return ()
    return OPTIMIZERS[choice.optimizer].states(name, shape)


def checkpointed(
    choice: OptimChoice, shapes: Mapping[str, Sequence[int]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of (states, counters) in a checkpoint of parameters of these `shapes`."""
    entry = OPTIMIZERS[choice.optimizer]
    states = (states_of(choice, *named) for named in shapes.items())
    counters = (entry.counters(*named) for named in shapes.items())
    return tuple(dict.fromkeys(chain(*states))), tuple(dict.fromkeys(chain(*counters)))


def moments_type(choice: OptimChoice) -> Moments:
    """Return the storage type of both AdamW moments: fp32, bf16 or int8."""
    if choice.optimizer == "adamw8bit":
        return "int8"
    return choice.moments_dtype or ("fp32" if choice.arithmetic.keeps_fp32 else "bf16")


def _adam(module: nn.Module, choice: OptimChoice) -> torch.optim.Optimizer:
    groups = parameter_groups(module, choice.recipe().weight_decay)
    if not _uses_torchs_adam(choice):
        from launcher.optim.low_precision import LowPrecisionAdamW

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


class Sgd(torch.optim.SGD):
    """torch's SGD, whose momenta begin at 0.

    torch's fused one allocates them without values, which stay where the first step is skipped.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        for parameter in group["params"] if group["fused"] and group["momentum"] else ():
            if parameter.grad is not None and not self.state.get(parameter):
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        sparse: bool = super()._init_group(group, *lists)
        return sparse


def _sgd(module: nn.Module, choice: OptimChoice) -> torch.optim.Optimizer:
    groups = parameter_groups(module, choice.recipe().weight_decay)
    # torch has no fused SGD for DTensors; foreach would hold a copy of all gradients at once.
    fused = not is_dtensor(groups[0]["params"][0])
    return Sgd(groups, lr=choice.recipe().lr, momentum=choice.momentum, fused=fused, foreach=False)


def _uses_torchs_adam(choice: OptimChoice) -> bool:
    return moments_type(choice) == "fp32" and choice.arithmetic.keeps_fp32


def _adam_costs(
    _: str, shape: Sequence[int], choice: OptimChoice, device_type: str
) -> OptimizerCosts:
    elements = math.prod(shape)
    if _uses_torchs_adam(choice):
        return fused_adam_costs(elements)
    from launcher.optim.low_precision import costs

    return costs(
        elements,
        moments=moments_type(choice),
        bf16_weight=not choice.arithmetic.keeps_fp32,
        compensation=choice.compensation,
        on_gpu=device_type == "cuda",
    )


def _sgd_costs(_: str, shape: Sequence[int], choice: OptimChoice, __: str) -> OptimizerCosts:
    elements = math.prod(shape)
    if choice.momentum:
        return OptimizerCosts(states_bytes=(4 * elements,), update_bytes=20 * elements)
    return OptimizerCosts(states_bytes=(), update_bytes=12 * elements)


_ADAM: Final = OptimizerEntry(build=_adam, states=lambda name, shape: MOMENTS, costs=_adam_costs)
_SGD: Final = OptimizerEntry(
    build=_sgd,
    states=lambda name, shape: ("momentum_buffer",),
    costs=_sgd_costs,
    copies_to_decay=True,
    counters=lambda name, shape: (),
    rates_from="found with AdamW: sgd has no usual rate for decoders, so try larger ones",
)
_BY_NAME: Final[Mapping[OptimizerName, OptimizerEntry | str]] = {
    "adamw": _ADAM,
    "adam": _ADAM,
    "sgd": _SGD,
    "adafactor": "launcher.optim.adafactor",
    "adamw8bit": _ADAM,
    "muon": "launcher.optim.muon",
    "apollo": "launcher.optim.apollo",
}
"""Name -> entry, or the module whose `ENTRY` it is."""


class _Optimizers(Mapping[OptimizerName, OptimizerEntry]):
    """Entries by name; a module is imported when its entry is first asked for."""

    def __getitem__(self, name: OptimizerName) -> OptimizerEntry:
        found = _BY_NAME[name]
        if isinstance(found, str):
            entry: OptimizerEntry = import_module(found).ENTRY
            return entry
        return found

    def __iter__(self) -> Iterator[OptimizerName]:
        return iter(_BY_NAME)

    def __len__(self) -> int:
        return len(_BY_NAME)


OPTIMIZERS: Final = _Optimizers()
