"""What a prediction is about: one rank of a resolved run."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from launcher.config.resolve import Resolved
from launcher.memory.parameters import COUNTER_BYTES, Parameter, parameters_of
from launcher.memory.timeline import Where
from launcher.memory.trace_events import Compute
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
    def parameters(self) -> tuple[Parameter, ...]:
        """The whole model's parameters."""
        return parameters_of(self.resolved.model)

    @property
    def low(self) -> bool:
        """Whether the model computes in types of two bytes."""
        return self.resolved.config.optim.precision != "fp32"

    @property
    def stored_bytes(self) -> int:
        """Bytes of an element of parameters, gradients and master weights between steps, where
        they are not a copy to compute with."""
        return 2 if self.resolved.config.optim.precision == "bf16-pure" else FP32

    @property
    def accumulates_in_fp32(self) -> bool:
        """Whether ZeRO adds up bf16 gradients in fp32."""
        optim, sharding = self.resolved.config.optim, self.resolved.config.sharding
        return optim.precision == "bf16" and sharding.grad_accum_dtype == "fp32"

    @property
    def compute(self) -> Compute:
        """In which types the model computes."""
        sharding = self.resolved.config.sharding
        cast = sharding.strategy == "fsdp" or (sharding.strategy == "zero" and sharding.zero != 0)
        in_low = self.low and (cast or self.stored_bytes == 2)
        return Compute(
            params_dtype=torch.bfloat16 if in_low else torch.float32,
            autocast=self.low and not in_low,
            stage3=sharding.zero == 3,
        )

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

    def update_bytes(self, shape: Sequence[int]) -> int:
        """What the optimizer holds on top while it updates one tensor."""
        choice = self.resolved.config.optim
        return OPTIMIZERS[choice.optimizer].temporary_bytes(shape, choice)

    def optimizer_bytes(self, shape: Sequence[int]) -> int:
        """What the optimizer keeps beside one tensor, its counters included."""
        choice = self.resolved.config.optim
        entry = OPTIMIZERS[choice.optimizer]
        return entry.state_bytes(shape, choice) + COUNTER_BYTES * len(entry.counters)
