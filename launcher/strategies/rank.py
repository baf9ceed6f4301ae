"""What a prediction is about: one rank of a resolved run."""

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.config.resolve import Resolved
from launcher.memory.parameters import Parameter, parameters_of
from launcher.memory.timeline import Where
from launcher.optim.dtypes import Dtypes, dtypes
from launcher.optim.registry import OPTIMIZERS

FP32 = 4

_WHERE: dict[str, Where] = {"none": "device", "cpu": "host", "nvme": "disk"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """A resolved run seen by one of its ranks."""

    resolved: Resolved
    world_size: int
    rank: int
    device_type: str

    @property
    def types(self) -> Dtypes:
        """What is stored and what is computed in."""
        return dtypes(self.resolved.config.optim)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The whole model's parameters."""
        return parameters_of(self.resolved.model)

    @property
    def low(self) -> bool:
        """Whether the model computes in types of two bytes."""
        return self.types.computed.itemsize == 2

    @property
    def stored_bytes(self) -> int:
        """Bytes of an element of parameters, gradients and master weights between steps, where
        they are not a copy to compute with."""
        return self.types.stored.itemsize

    @property
    def accumulates_in_fp32(self) -> bool:
        """Whether ZeRO adds up bf16 gradients in fp32."""
        optim, sharding = self.resolved.config.optim, self.resolved.config.sharding
        return optim.precision == "bf16" and sharding.grad_accum_dtype == "fp32"

    @property
    def params_where(self) -> Where:
        """Where idle parameters are."""
        return _WHERE[self.resolved.config.sharding.offload_param]

    @property
    def optimizer_where(self) -> Where:
        """Where master weights and optimizer states are."""
        return _WHERE[self.resolved.config.sharding.offload_optimizer]

    @property
    def updates_in_backward(self) -> bool:
        """Whether each gradient is used up as soon as it is there."""
        return self.resolved.config.optim.optimizer_in_backward

    def update_bytes(self, shape: Sequence[int], name: str = "") -> int:
        """What the optimizer holds on top while it updates one tensor."""
        choice = self.resolved.config.optim
        return OPTIMIZERS[choice.optimizer].temporary_bytes(name, shape, choice)

    def optimizer_bytes(self, shape: Sequence[int], name: str = "") -> int:
        """What the optimizer keeps beside one tensor, its counters included."""
        choice = self.resolved.config.optim
        return OPTIMIZERS[choice.optimizer].state_bytes(name, shape, choice)
