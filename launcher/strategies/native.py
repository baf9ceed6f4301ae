"""The engine of every strategy that trains with plain PyTorch autograd and optimizers."""

import contextlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from launcher.memory.ledger import Ledger
from launcher.memory.storages import StorageCount, optimizer_tensors
from launcher.optim.dtensor import is_dtensor
from launcher.strategies.engine import LossScale, StepResult
from launcher.strategies.flat_shards import TrainingState
from launcher.strategies.native_shards import NativeState


class NativeEngine:
    """Single, DDP and FSDP differ in how the module is wrapped and in `set_sync`.

    Args:
        module: the wrapped model; called with (tokens, targets) it returns the mean loss.
        optimizer: over the module's (sharded) parameters.
        accumulation: micro-batches per step.
        clip: largest global gradient norm; 0 = do not clip.
        device: where it computes.
        autocast: type to compute in where the module itself keeps fp32 parameters.
        scaled: whether losses are scaled, as fp16 needs it.
        set_sync: told before each forward whether its backward communicates gradients.
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
        set_sync: Callable[[bool], None] = lambda last: None,
        free_gathered: Callable[[], None] = lambda: None,
        keeps_gradients: bool = False,
        hidden_gradients: Callable[[], Iterable[Tensor | None]] = tuple,
    ) -> None:
        self._module = module
        self._optimizer = optimizer
        self._scale = 1.0 / accumulation
        self._clip = clip
        self._device = device
        self._autocast = autocast
        self._scaler = torch.amp.GradScaler(device.type, enabled=scaled)
        self._set_sync = set_sync
        self._free_gathered = free_gathered
        self._keeps_gradients = keeps_gradients
        self._hidden_gradients = hidden_gradients

    def begin_step(self, lr: float) -> None:
        """Only an update inside the backward needs to know that early."""

    def forward(self, tokens: Tensor, targets: Tensor, *, last: bool) -> Tensor:
        self._set_sync(last)
        with self._compute_type():
            loss: Tensor = self._module(tokens, targets)
        return loss

    def backward(self, loss: Tensor) -> None:
        self._scaler.scale(loss * self._scale).backward()

    def step(self, lr: float) -> StepResult:
        if self._scaler.is_enabled():
            self._scaler.unscale_(self._optimizer)
        limit = self._clip if self._clip > 0 else float("inf")
        norm = nn.utils.clip_grad_norm_(self._module.parameters(), limit)
        if is_dtensor(norm):
            norm = norm.full_tensor()
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        finite = torch.isfinite(norm)
        update_where_finite(self._optimizer, finite)
        self._optimizer.zero_grad(set_to_none=not self._keeps_gradients)
        if self._scaler.is_enabled():
            self._scaler.update()
        return StepResult(grad_norm=norm, applied=finite)

    def loss_scale(self) -> LossScale | None:
        if not self._scaler.is_enabled():
            return None
        state = self._scaler.state_dict()
        return LossScale(scale=state["scale"], good_steps=state["_growth_tracker"])

    def set_loss_scale(self, value: LossScale) -> None:
        if self._scaler.is_enabled():
            moved = {"scale": value.scale, "_growth_tracker": value.good_steps}
            self._scaler.load_state_dict({**self._scaler.state_dict(), **moved})

    def evaluate(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self._module.eval()
        with torch.no_grad(), self._compute_type():
            loss: Tensor = self._module(tokens, targets)
        self._free_gathered()
        self._module.train()
        return loss

    def count_states(self) -> StorageCount:
        count = StorageCount()
        parameters = list(self._module.parameters())
        count.add("params", parameters)
        count.add("grads", [p.grad for p in parameters])
        count.add("grads", self._hidden_gradients())
        count.add("optimizer", optimizer_tensors(self._optimizer))
        return count

    def training_state(self) -> TrainingState:
        return NativeState(self._module, self._optimizer)

    def ledger(self) -> Ledger:
        return self.count_states().ledger(self._device)

    def _compute_type(self) -> contextlib.AbstractContextManager[None]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast)


def update_where_finite(optimizer: torch.optim.Optimizer, finite: Tensor) -> None:
    """Update the parameters, unless a gradient is NaN or infinite: then nothing changes.

    A fused optimizer decides that on the device; for others the host has to wait and look.
    """
    if any(group.get("fused") for group in optimizer.param_groups):
        optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]  # as GradScaler does
        optimizer.step()
    elif bool(finite):
        optimizer.step()
