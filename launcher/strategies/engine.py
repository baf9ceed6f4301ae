"""What every strategy offers to the training loop: four verbs and a ledger."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from annotated_types import Interval
from torch import Tensor, nn

from launcher.config.schema import RunConfig
from launcher.memory.ledger import Ledger
from launcher.memory.storages import StorageCount
from launcher.model.config import ModelConfig
from launcher.parallel.world import World
from launcher.strategies.flat_shards import TrainingState
from launcher.strategies.fp8 import to_fp8


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one optimizer step did.

    `grad_norm` is the global norm before clipping, `applied` is False where a step was skipped.
    Tensors on the device stay there, so that reading them costs a synchronisation only where
    they are shown.
    """

    grad_norm: Tensor | float
    applied: Tensor | bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """What fp16 losses are multiplied with, so that small gradients do not vanish.

    Halved by each step that overflows, doubled after a long enough row of steps that do not.
    """

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}  # noqa: RUF012

    scale: Annotated[float, Interval(gt=0, lt=2**128)]
    good_steps: Annotated[int, Interval(ge=0, lt=2**31)]
    """Steps since it last changed."""


class Engine(Protocol):
    """One way of sharding. The loop calls the verbs and knows nothing else about it."""

    def begin_step(self, lr: float) -> None:
        """Comes before a step's first forward, with the learning rate that `step` will get."""

    def forward(self, tokens: Tensor, targets: Tensor, *, last: bool) -> Tensor:
        """Mean loss of one micro-batch, [B, T] int64 each -> fp32 scalar.

        `last` says that this micro-batch closes the accumulation window; whoever communicates
        gradients needs to know before the forward.
        """

    def backward(self, loss: Tensor) -> None:
        """Add this micro-batch's gradients, scaled by 1/accumulation."""

    def step(self, lr: float) -> StepResult:
        """Clip, update the parameters, drop the gradients."""

    def loss_scale(self) -> LossScale | None:
        """Where fp16's scaling of the loss stands; None where nothing is scaled."""

    def set_loss_scale(self, value: LossScale) -> None:
        """Go on from another run's; without effect where nothing is scaled."""

    def evaluate(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean loss without gradients and without dropout; every rank must call it.

        What it gathers of sharded parameters is freed again: a save may come next.
        """

    def count_states(self) -> StorageCount:
        """The storages of training state this rank holds right now."""

    def training_state(self) -> TrainingState:
        """What a checkpoint holds of this rank, as ranges of flattened fp32 tensors."""

    def ledger(self) -> Ledger:
        """Their bytes, by category and place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What a strategy builds from.

    It gets factories, because FSDP shards before the optimizer exists and ZeRO-3 shards while
    the model is being built.
    """

    config: RunConfig
    model: ModelConfig
    world: World
    accumulation: int
    new_module: Callable[[], nn.Module]
    new_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    initial_value: Callable[[str, torch.Size], Tensor]
    """(parameter name, full shape) -> its fp32 initial value, on the compute device."""

    def meta_module(self) -> nn.Module:
        """The model without memory: shapes only, to be sharded or filled."""
        with torch.device("meta"):
            module = self.new_module()
        if self.config.optim.precision == "fp8":
            module = to_fp8(module, self.world.device)
        return module
