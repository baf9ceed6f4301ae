"""The norm of all gradients of the model, of which a rank may have parts."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from launcher.optim.dtensor import is_dtensor, local_part
from launcher.parallel.tensor.parts import Parts


class Gradients:
    """Those of a (wrapped, sharded) module's parameters, on all ranks that share its matrices.

    What is whole on each of them counts once.
    """

    def __init__(self, module: nn.Module, parts: Parts | None) -> None:
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        self._parameters = list(inner.parameters())
        self._tensor_group = None if parts is None else parts.tensor_group
        self._cut = set()
        if parts is not None:
            cuts = parts.cuts
            self._cut = {p for name, p in inner.named_parameters() if not cuts[name].is_whole}

    def clip(self, limit: float) -> Tensor:
        """Scale them down to a norm of `limit`; their norm before."""
        if self._tensor_group is None:
            norm = nn.utils.clip_grad_norm_(self._parameters, limit)
            return _full(norm)
        norm = self.norm()
        nn.utils.clip_grads_with_norm_(self._parameters, limit, norm)
        return norm

    def norm(self) -> Tensor:
        """Of all of them, an fp32 scalar."""
        cut = [p.grad for p in self._parameters if p.grad is not None and p in self._cut]
        whole = [p.grad for p in self._parameters if p.grad is not None and p not in self._cut]
        norm = _full(nn.utils.get_total_norm(whole))
        if self._tensor_group is None:
            return norm
        of_parts = self._tensor_group.all_reduce(_full(nn.utils.get_total_norm(cut)).square())
        return (of_parts + norm.square()).sqrt()

    def square_sum(self, parameter: Tensor) -> Tensor:
        """Of one parameter, over all ranks' parts, so that all of them update, or none."""
        assert parameter.grad is not None
        local = local_part(parameter.grad)
        square_sum: Tensor = torch.linalg.vector_norm(local, dtype=torch.float32).square()
        if is_dtensor(parameter.grad):  # in hybrid sharding the replicas have the same parts
            mesh = parameter.grad.device_mesh
            dist.all_reduce(square_sum, group=mesh.get_group(mesh.ndim - 1))
        if self._tensor_group is not None and parameter in self._cut:
            self._tensor_group.all_reduce(square_sum)
        return square_sum


class Scaler(torch.amp.GradScaler):
    """Skips a step on all ranks that share matrices, or on none."""

    def __init__(self, device_type: str, *, enabled: bool, parts: Parts | None) -> None:
        super().__init__(device_type, enabled=enabled)
        self._tensor_group = None if parts is None else parts.tensor_group

    def _unscale_grads_(self, *args: Any, **options: Any) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = super()._unscale_grads_(*args, **options)
        if self._tensor_group is not None:
            for flag in found.values():
                self._tensor_group.all_reduce_max(flag)
        return found


def _full(norm: Tensor) -> Tensor:
    return norm.full_tensor() if is_dtensor(norm) else norm
