"""Engines of the strategies that train with plain PyTorch autograd and optimizers."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from launcher.model.foreign.routing import Routing
from launcher.optim.dtensor import is_dtensor, local_part
from launcher.parallel.model_parallel import ModelShards
from launcher.strategies.build_inputs import BuildInputs
from launcher.strategies.engine import Engine, LossScale, StepResult, StorageCount
from launcher.strategies.flat_shards import TrainingState
from launcher.strategies.native_state import native_state


class Gradients:
    """Norms over the gradients of all model-parallel ranks; replicated parameters count once."""

    def __init__(self, module: nn.Module, shards: ModelShards | None) -> None:
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        self._parameters = list(inner.parameters())
        self._model_parallel = None if shards is None else shards.model_parallel
        self._sharded = set()
        if shards is not None:
            named = inner.named_parameters()
            self._sharded = {p for name, p in named if not shards.of[name].replicated}

    def clip(self, limit: float) -> Tensor:
        """Scale gradients down to a norm of `limit`; return their norm before."""
        norm = self.norm()
        nn.utils.clip_grads_with_norm_(self._parameters, limit, norm)
        return norm

    def norm(self) -> Tensor:
        """Return the norm of all gradients, an fp32 scalar."""
        sharded = [p.grad for p in self._parameters if p.grad is not None and p in self._sharded]
        replicated = [
            p.grad for p in self._parameters if p.grad is not None and p not in self._sharded
        ]
        norm = _full(nn.utils.get_total_norm(replicated))
        if self._model_parallel is None:
            return norm
        square_sum = _full(nn.utils.get_total_norm(sharded)).square()
        return (self._model_parallel.all_reduce(square_sum) + norm.square()).sqrt()

    def square_sum(self, parameter: Tensor) -> Tensor:
        """Square sum of one parameter's gradient over all of its shards, so that all ranks update
        it, or none."""
        assert parameter.grad is not None
        local = local_part(parameter.grad)
        square_sum: Tensor = torch.linalg.vector_norm(local, dtype=torch.float32).square()
        if is_dtensor(parameter.grad):  # replicas of hybrid sharding hold the same
            mesh = parameter.grad.device_mesh
            dist.all_reduce(square_sum, group=mesh.get_group(mesh.ndim - 1))
        if self._model_parallel is not None and parameter in self._sharded:
            self._model_parallel.all_reduce(square_sum)
        return square_sum


class Scaler(torch.amp.GradScaler):
    """A GradScaler that skips a step on all model-parallel ranks, or on none."""

    def __init__(self, device_type: str, *, enabled: bool, shards: ModelShards | None) -> None:
        super().__init__(device_type, enabled=enabled)
        self._model_parallel = None if shards is None else shards.model_parallel

    def _unscale_grads_(self, *args: Any, **options: Any) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = super()._unscale_grads_(*args, **options)
        if self._model_parallel is not None:
            for flag in found.values():
                self._model_parallel.all_reduce_max(flag)
        return found


class NativeEngine:
    """Single, DDP and FSDP differ in how the module is wrapped and in `set_sync`.

    Args:
        module: the wrapped model; called with (tokens, targets, starts) it returns the mean loss.
        optimizer: over the module's (sharded) parameters.
        accumulation: micro-batches per step.
        clip: largest global gradient norm; 0 = do not clip.
        device: where it computes.
        autocast: type to compute in where the module itself keeps fp32 parameters.
        scaled: whether losses are scaled, as fp16 needs it.
        shards: its shards of parameters, where model-parallel ranks hold different ones.
        set_sync: called before each forward; True if its backward communicates gradients.
        free_gathered: called after a forward without the backward that frees what it has gathered.
        keeps_gradients: whether gradients are zeroed in place, where dropping them frees nothing.
        hidden_gradients: gradients that are on no parameter of the module, for the ledger.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        accumulation: int,
        clip: float,
        device: torch.device,
        autocast: torch.dtype | None = None,
        scaled: bool = False,
        shards: ModelShards | None = None,
        set_sync: Callable[[bool], None] = lambda last: None,
        free_gathered: Callable[[], None] = lambda: None,
        keeps_gradients: bool = False,
        hidden_gradients: Callable[[], Iterable[Tensor | None]] = tuple,
    ) -> None:
        self._module = module
        self._routing = Routing.of(module)
        self._optimizer = optimizer
        self._scale = 1.0 / accumulation
        self._clip = clip
        self._device = device
        self._autocast = autocast
        self._scaler = Scaler(device.type, enabled=scaled, shards=shards)
        self._shards = shards
        self._gradients = Gradients(module, shards)
        self._set_sync = set_sync
        self._free_gathered = free_gathered
        self._keeps_gradients = keeps_gradients
        self._hidden_gradients = hidden_gradients

    def begin_step(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def forward(
        self, tokens: Tensor, targets: Tensor, starts: Tensor | None = None, *, last: bool
    ) -> Tensor:
        self._set_sync(last)
        return self._compute(tokens, targets, starts)

    def backward(self, loss: Tensor) -> None:
        self._scaler.scale(loss * self._scale).backward()

    def step(self) -> StepResult:
        # In place of GradScaler.step(), which reads its flag on the host: here the norm decides.
        self._scaler.unscale_(self._optimizer)
        limit = self._clip if self._clip > 0 else float("inf")  # inf: a factor of 1, norm only
        norm = self._gradients.clip(limit)
        finite = torch.isfinite(norm)  # NaN or inf in any gradient shows in the norm
        _update_where_finite(self._optimizer, finite)
        self._drop_gradients()
        self._scaler.update()
        return norm, finite

    def loss_scale(self) -> LossScale | None:
        if not self._scaler.is_enabled():
            return None
        state = self._scaler.state_dict()
        return LossScale(scale=state["scale"], good_steps=state["_growth_tracker"])

    def set_loss_scale(self, value: LossScale) -> None:
        if self._scaler.is_enabled():
            # It grows at one exact count only: another window's may be beyond it.
            good_steps = min(value.good_steps, self._scaler.get_growth_interval() - 1)
            moved = {"scale": value.scale, "_growth_tracker": good_steps}
            self._scaler.load_state_dict({**self._scaler.state_dict(), **moved})

    def evaluate(
        self, tokens: Tensor, targets: Tensor | None = None, starts: Tensor | None = None
    ) -> Tensor:
        self._module.eval()
        with torch.no_grad():
            loss_or_logits = self._compute(tokens, targets, starts)
        self._free_gathered()
        self._module.train()
        return loss_or_logits

    def routed(self) -> Tensor | None:
        return None if self._routing is None else self._routing.take()

    def count_states(self) -> StorageCount:
        count = StorageCount()
        parameters = list(self._module.parameters())
        count.add("params", [p for p in parameters if p.requires_grad])
        count.add("frozen", parameters)  # the others
        count.add("grads", [p.grad for p in parameters])
        count.add("grads", self._hidden_gradients())
        count.add("optimizer", optimizer_tensors(self._optimizer))
        return count

    def training_state(self) -> TrainingState:
        return native_state(self._module, self._optimizer, self._shards)

    def _drop_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=not self._keeps_gradients)

    def _compute(self, tokens: Tensor, targets: Tensor | None, starts: Tensor | None) -> Tensor:
        with torch.autocast(self._device.type, self._autocast, enabled=self._autocast is not None):
            loss_or_logits: Tensor = self._module(tokens, targets, starts)
        return loss_or_logits


class InBackwardEngine(NativeEngine):
    """A native engine that never holds more gradients than one parameter's (FSDP: one block's).

    Nothing can be clipped, since the norm of all gradients is known when all parameters are
    updated already; it is summed up on the way, and reported. A parameter whose gradient is not
    finite keeps its value and states, and the step counts as skipped.

    Args:
        module: the (sharded) model; DDP has no place here, its buckets hold all gradients anyway.
        optimizer: over the module's parameters.
        options: what else NativeEngine takes, for one micro-batch per step and without clipping.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        super().__init__(module, optimizer, **options)
        assert self._scale == 1.0  # the rule `in_backward` holds both
        assert self._clip == 0
        self._square_sum: Tensor | float = 0.0
        self._group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
        for parameter in self._group_of:
            # FSDP2 calls it when a sharded gradient is reduced, autograd elsewhere.
            parameter.register_post_accumulate_grad_hook(self._update)

    def begin_step(self, lr: float) -> None:
        super().begin_step(lr)
        self._square_sum = 0.0

    def step(self) -> StepResult:
        assert isinstance(self._square_sum, Tensor)
        norm = self._square_sum.sqrt()
        return norm, torch.isfinite(norm)

    def _update(self, parameter: Tensor) -> None:
        """Update one parameter and drop its gradient."""
        square_sum = self._gradients.square_sum(parameter)
        self._square_sum = square_sum + self._square_sum
        # The optimizer is shown this parameter only: it would look through all the others.
        groups = self._optimizer.param_groups
        kept = [group["params"] for group in groups]
        for group in groups:
            group["params"] = []
        self._group_of[parameter]["params"] = [parameter]
        _update_where_finite(self._optimizer, torch.isfinite(square_sum))
        for group, parameters in zip(groups, kept, strict=True):
            group["params"] = parameters
        parameter.grad = None


def native_engine(
    inputs: BuildInputs,
    module: nn.Module,
    *,
    engine: type[NativeEngine] = NativeEngine,
    **options: Any,
) -> Engine:
    """Return the engine of a run over its (wrapped or sharded) module; `options` go to
    NativeEngine."""
    optim, types = inputs.config.optim, inputs.types
    if optim.optimizer_in_backward:
        engine = InBackwardEngine
    return engine(
        module,
        inputs.new_optimizer(module),
        accumulation=inputs.resolved.accumulation,
        clip=optim.clip,
        device=inputs.world.device,
        autocast=types.autocast,
        scaled=types.scaled,
        shards=inputs.model_shards,
        **options,
    )


def _update_where_finite(optimizer: torch.optim.Optimizer, finite: Tensor) -> None:
    """Update the parameters, unless a gradient is NaN or infinite: then nothing changes.

    A fused optimizer decides that on the device; for others the host has to wait and look.
    """
    if any(group.get("fused") for group in optimizer.param_groups):
        optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]  # as GradScaler does
        optimizer.step()
    elif bool(finite):
        optimizer.step()


def _full(norm: Tensor) -> Tensor:
    return norm.full_tensor() if is_dtensor(norm) else norm


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all tensors in an optimizer's state, the step counters included."""
    states = optimizer.state.values()
    return [v for state in states for v in state.values() if isinstance(v, Tensor)]
