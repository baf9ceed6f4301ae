"""Description and construction of an optimizer: entry, costs, parameter groups, and AdamW beside
another optimizer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from launcher.model.parts import block_of
from launcher.optim.choice import OptimChoice, Task

COUNTER_BYTES: Final = 4
"""torch counts an optimizer's steps in one fp32 scalar per tensor."""
MOMENTS: Final = ("exp_avg", "exp_avg_sq")
Groups = list[dict[str, Any]]
Build = Callable[[nn.Module, OptimChoice], torch.optim.Optimizer]
Names = Callable[[str, Sequence[int]], tuple[str, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerCosts:
    """Bytes and FLOPs of an optimizer for one tensor, or for the range of it that a rank holds."""

    states_bytes: tuple[int, ...]
    """Bytes of each state and counter, in the order of their allocation."""
    update_bytes: int
    """Read and written by the kernels of an update: weight, gradient, states and intermediates."""
    update_flops: int = 0
    """FLOPs of the update's matmuls in bf16."""
    update_fp32_flops: int = 0
    """FLOPs of the update's matmuls in fp32."""
    temporary_bytes: int = 0
    """Peak of the update beside weight, gradient and states; 0 where it is fused."""

    @property
    def state_bytes(self) -> int:
        """Return the bytes of all states and counters."""
        return sum(self.states_bytes)


def fused_adam_costs(elements: int) -> OptimizerCosts:
    """Return the costs of fused Adam: two fp32 moments; reads all, writes all but the gradient."""
    return OptimizerCosts(
        states_bytes=(COUNTER_BYTES, 4 * elements, 4 * elements), update_bytes=28 * elements
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerEntry:
    """Description of an optimizer for the rest of the program."""

    build: Build
    states: Names
    """(parameter name, shape) -> names of its states in a checkpoint."""
    costs: Callable[[str, Sequence[int], OptimChoice, str], OptimizerCosts]
    """(parameter name, its shape or that of a rank's range of it, the choice, type of the updating
    device) -> costs. A range of several parameters has the name ""."""
    counters: Names = lambda name, shape: ("step",)
    """(parameter name, shape) -> names of its scalar states."""
    copies_to_decay: bool = False
    """Of DTensors, for which it is not fused: adds weight decay to a copy of the gradient."""
    elementwise: bool = True
    """An element's update needs only its own gradient and states, so that any flat range of
    a parameter can be updated alone."""
    rates: Mapping[Task, float] = field(default_factory=dict)
    """Default learning rates, where their scale differs from AdamW's."""
    rates_from: str = ""
    """Their source, or a caution about AdamW's."""


def parameter_groups(
    module: nn.Module,
    weight_decay: float,
    only: Callable[[str, Sequence[int]], bool] = lambda name, shape: True,
) -> Groups:
    """Group the trained parameters for which `only(name, full shape)` holds: weight decay for
    matrices and embeddings, none for biases and norms."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        # Under ZeRO-3 a parameter is empty between uses and keeps its real shape in an attribute.
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


class WithAdamW(torch.optim.Optimizer):
    """An optimizer of the blocks' matrices, and AdamW for everything else, as one optimizer.

    Both write into one `state` and step over one list of `param_groups`.

    Args:
        hidden: an optimizer of two-dimensional parameters.
        rest: groups of all others: embeddings, the head, biases and norms. None where only
            adapters are trained.
        choice: learning rate, betas and epsilon.
    """

    def __init__(
        self, hidden: torch.optim.Optimizer, rest: list[dict[str, Any]], choice: OptimChoice
    ) -> None:
        super().__init__([*hidden.param_groups, *rest], {"lr": choice.recipe().lr})
        self._parts: list[Any] = [hidden, *([_adamw(rest, choice)] if rest else [])]
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
    """Return whether a parameter is a matrix of a block: no table of scalars, as one bias for each
    expert is, nor matrices that are one parameter together, as those of experts are."""
    matrix = name.rpartition(".")[2] in ("weight", "lora_a", "lora_b")
    return matrix and block_of(name) is not None and len(shape) == 2 and 1 not in shape


def with_adamw(new_hidden: Callable[[Groups, OptimChoice], torch.optim.Optimizer]) -> Build:
    """Return the `build` of an optimizer that updates the blocks' matrices beside AdamW."""

    def build(module: nn.Module, choice: OptimChoice) -> torch.optim.Optimizer:
        hidden = parameter_groups(module, choice.recipe().weight_decay, is_hidden)
        rest = parameter_groups(
            module, choice.recipe().weight_decay, lambda *of: not is_hidden(*of)
        )
        if not hidden:  # adapters of rank 1 are vectors
            return _adamw(rest, choice)
        return WithAdamW(new_hidden(hidden, choice), rest, choice)

    return build


def _adamw(groups: Groups, choice: OptimChoice) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        groups, lr=choice.recipe().lr, betas=choice.betas, eps=choice.eps, fused=True
    )


def of_hidden(states: tuple[str, ...], others: tuple[str, ...]) -> Names:
    """Return `states` for the matrices of blocks and `others` for other parameters."""
    return lambda name, shape: states if is_hidden(name, shape) else others
