"""What every strategy offers to the training loop, and the step that is made of it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
import torch.distributed as dist
from annotated_types import Interval
from torch import Tensor, nn

from launcher.config.resolve import Resolved
from launcher.config.schema import RunConfig
from launcher.model.gpt import initial_value
from launcher.model.quantized import PACKED
from launcher.optim.dtypes import Dtypes
from launcher.optim.registry import build_optimizer
from launcher.parallel.context.group import ContextGroup
from launcher.parallel.decoder import decoder
from launcher.parallel.tensor.group import TensorGroup
from launcher.parallel.tensor.parts import Parts
from launcher.parallel.world import World
from launcher.strategies.flat_shards import TrainingState
from launcher.strategies.materialize import materialize_whole
from launcher.strategies.parameters import cuts_of, is_trained
from launcher.strategies.storages import StorageCount
from launcher.util.errors import UserError


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
        """Comes before a step's first forward, with the learning rate of its update."""

    def forward(
        self, tokens: Tensor, targets: Tensor, starts: Tensor | None = None, *, last: bool
    ) -> Tensor:
        """Mean loss of one micro-batch, [B, T] int64 each -> fp32 scalar.

        With `starts` attention stays inside documents (`GPT.forward`). `last` says that this
        micro-batch closes the accumulation window; whoever communicates gradients needs to know
        before the forward.
        """

    def backward(self, loss: Tensor) -> None:
        """Add this micro-batch's gradients, scaled by 1/accumulation."""

    def step(self) -> StepResult:
        """Clip, update the parameters, drop the gradients."""

    def loss_scale(self) -> LossScale | None:
        """Where fp16's scaling of the loss stands; None where nothing is scaled."""

    def set_loss_scale(self, value: LossScale) -> None:
        """Go on from another run's; without effect where nothing is scaled."""

    def evaluate(
        self, tokens: Tensor, targets: Tensor | None = None, starts: Tensor | None = None
    ) -> Tensor:
        """Mean loss without gradients and without dropout, or the logits [B, T, V] where there are
        no targets; every rank must call it.

        What it gathers of sharded parameters is freed again: a save may come next.
        """

    def count_states(self) -> StorageCount:
        """The storages of training state this rank holds right now."""

    def training_state(self) -> TrainingState:
        """What a checkpoint holds of this rank, as ranges of flattened fp32 tensors."""


def train_step(
    engine: Engine,
    micro_batches: Sequence[tuple[Tensor, ...]],
    lr: float,
    *,
    weights: Sequence[float] = (),
    phase: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> tuple[Tensor, StepResult]:
    """One optimizer step over an accumulation window of (tokens, targets) or, with documents,
    (tokens, targets, starts), [B, T] int64 each.

    Engines average micro-batches and ranks. Where these have not all as many targets that count,
    the mean of the global batch is that of their means times `weights`
    (`GlobalBatches.weights`); none for 1 each.

    Each forward and backward and the step run in a `phase` of that name. Returns this rank's mean
    loss, an fp32 scalar on the device (over all ranks, their mean is the global batch's), and what
    the step did.
    """
    engine.begin_step(lr)
    loss_sum = torch.zeros((), device=micro_batches[0][0].device)
    for number, inputs in enumerate(micro_batches, start=1):
        with phase("forward"):
            loss = engine.forward(*inputs, last=number == len(micro_batches))
            if weights:
                loss = loss * weights[number - 1]
        loss_sum += loss.detach()
        with phase("backward"):
            engine.backward(loss)
        del loss  # and what its graph still holds, before the next forward
    with phase("step"):
        result = engine.step()
    return loss_sum / len(micro_batches), result


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """Ranks that each can hold a shard of the same states."""

    rank: int
    """This one's place among them."""
    size: int
    group: dist.ProcessGroup | None
    """None for all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What a strategy builds from.

    Parts, because FSDP shards before the optimizer exists and ZeRO-3 shards while the model is
    being built.
    """

    resolved: Resolved
    world: World
    types: Dtypes
    """What the strategy stores and computes in."""
    context_group: ContextGroup | None = None
    """The ranks that share its sequences."""
    tensor_group: TensorGroup | None = None
    """The ranks that share its matrices."""

    @property
    def config(self) -> RunConfig:
        """The whole config."""
        return self.resolved.config

    @property
    def shards(self) -> Shards:
        """The ranks that states can be sharded over: those with the same parts of matrices."""
        if self.tensor_group is None:
            return Shards(rank=self.world.rank, size=self.world.size, group=None)
        ranks = self.tensor_group.share.ranks
        rank, size = self.world.rank // ranks, self.world.size // ranks
        return Shards(rank=rank, size=size, group=self.tensor_group.data_group)

    @property
    def parts(self) -> Parts | None:
        """What this rank has of matrices that are cut."""
        if self.tensor_group is None:
            return None
        cuts = cuts_of(self.resolved.model, self.tensor_group.share)
        return Parts(
            tensor_group=self.tensor_group,
            cuts=cuts,
            copy=self.shards.rank,
            copies=self.shards.size,
        )

    def new_module(self) -> nn.Module:
        """The model, on the device and under the modes of the context that this is called in."""
        return decoder(self.resolved.model, self.context_group, self.tensor_group)

    def meta_module(self) -> nn.Module:
        """The model without memory: shapes only, to be sharded or filled."""
        with torch.device("meta"):
            module = self.new_module()
        if self.config.optim.precision == "fp8":
            module = _to_fp8(module, self.world.device)
        return module

    def whole_module(self) -> nn.Module:
        """The model on the device, with its initial values."""
        module = self.meta_module()
        materialize_whole(
            module,
            self.initial_value,
            device=self.world.device,
            dtype=self.types.parameters,
            frozen_dtype=self.types.computed,  # no update is too small for it
        )
        return module

    def initial_value(self, name: str, shape: torch.Size) -> Tensor:
        """The fp32 initial value of this rank's part of a parameter, on the device; zeros where it
        is frozen and will be read from somewhere."""
        model, seed, device = self.resolved.model, self.config.loop.seed, self.world.device
        if self.config.model.init_from is not None and not is_trained(name, model):
            packed = name.endswith(PACKED)
            return torch.zeros(shape, dtype=torch.uint8 if packed else None, device=device)
        if self.tensor_group is None:
            return initial_value(name, shape, model, seed=seed, device=device)
        cut = cuts_of(model, self.tensor_group.share)[name]
        return cut.take(initial_value(name, cut.whole, model, seed=seed, device=device))

    def new_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """The run's optimizer over a module's parameters."""
        return build_optimizer(module, self.config.optim)


def _to_fp8(module: nn.Module, device: torch.device) -> nn.Module:
    """Replace the Linears (on the meta device, too) by ones that round their operands to fp8.

    Weights stay as they are, under their names; each tensor is scaled by its own largest value at
    every use. The head keeps the type of the rest: a loss is no place for 3 bits of mantissa. On a
    CPU the arithmetic is emulated.

    Raises:
        UserError: the GPU has no fp8 matmuls.
    """
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            name = torch.cuda.get_device_name(device)
            raise UserError(
                f"--precision fp8 needs a GPU of compute capability 8.9 or more (H100, L40S), and "
                f"{name} has {capability[0]}.{capability[1]}: use --precision bf16"
            )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    converted: nn.Module = convert_to_float8_training(
        module, config=Float8LinearConfig(emulate=device.type == "cpu")
    )
    return converted
