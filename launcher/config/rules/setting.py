"""What rules look at."""

from dataclasses import dataclass

from launcher.config.schema import RunConfig
from launcher.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A config in which all is filled in, whether or not it goes together, on so many ranks."""

    config: RunConfig
    model: ModelConfig
    world_size: int
    device_type: str

    @property
    def stage(self) -> int | None:
        """ZeRO stage, None for other strategies."""
        return self.config.sharding.zero if self.config.sharding.strategy == "zero" else None

    @property
    def seq_len(self) -> int:
        """Tokens per sequence."""
        return self.config.data.seq_len or self.model.context

    @property
    def batch_per_micro_batch(self) -> int:
        """Sequences that all ranks read at a time."""
        return self.config.data.micro_batch * self.world_size

    @property
    def accumulation(self) -> int:
        """Micro-batches per step; meaningless where the batch does not divide."""
        return (self.config.data.global_batch or 0) // self.batch_per_micro_batch
