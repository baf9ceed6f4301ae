"""The optimizer inside the backward: each parameter is updated when its gradient is there."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.optim.dtensor import is_dtensor, local_part
from launcher.strategies.engine import StepResult
from launcher.strategies.native import NativeEngine, update_where_finite


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
        assert self._scale == 1.0
        assert self._clip == 0
        self._lr: float | None = None
        self._square_sum: Tensor | float = 0.0
        self._group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
        for parameter in self._group_of:
            # FSDP2 calls it when a sharded gradient is reduced, autograd elsewhere.
            parameter.register_post_accumulate_grad_hook(self._update)

    def begin_step(self, lr: float) -> None:
        self._lr = lr
        self._square_sum = 0.0

    def step(self, lr: float) -> StepResult:
        assert lr == self._lr, "begin_step was not told this step's learning rate"
        assert isinstance(self._square_sum, Tensor)
        norm = self._square_sum.sqrt()
        return StepResult(grad_norm=norm, applied=torch.isfinite(norm))

    def _update(self, parameter: Tensor) -> None:
        """Update one parameter and drop its gradient."""
        gradient = parameter.grad
        assert gradient is not None
        assert self._lr is not None, "begin_step comes before the backward"
        square_sum = _square_sum(gradient)
        self._square_sum = square_sum + self._square_sum
        # The optimizer is shown this parameter only: it would look through all the others.
        groups = self._optimizer.param_groups
        kept = [group["params"] for group in groups]
        for group in groups:
            group["params"] = []
        own = self._group_of[parameter]
        own["params"], own["lr"] = [parameter], self._lr
        update_where_finite(self._optimizer, torch.isfinite(square_sum))
        for group, parameters in zip(groups, kept, strict=True):
            group["params"] = parameters
        parameter.grad = None


def _square_sum(gradient: Tensor) -> Tensor:
    """Of all ranks' parts, so that all of them update, or none."""
    local = local_part(gradient)
    square_sum: Tensor = torch.linalg.vector_norm(local, dtype=torch.float32).square()
    if is_dtensor(gradient):  # in hybrid sharding the replicas have the same parts
        mesh = gradient.device_mesh
        dist.all_reduce(square_sum, group=mesh.get_group(mesh.ndim - 1))
    return square_sum
