"""Everything that is refused because choices do not go together: one ordered list.

A rule is a pure function of a `Setting`: it yields a sentence for each condition that applies, with
the value and the fix. Each file here ends with its rules in order, and `resolve` asks one file
after the other: the first sentence of the first rule is what a run is refused with.
`shardscale matrix` prints the table of what goes with what from the same list.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from launcher.config.schema import RunConfig
from launcher.model.config import ModelConfig

LONGEST_BY_DEFAULT = 4096


def default_seq_len(model: ModelConfig) -> int:
    """Tokens per sequence when nobody says: the context, but not the 131,072 that some have."""
    return min(model.context, LONGEST_BY_DEFAULT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A config with all defaults filled in, its choices compatible or not, and where it runs."""

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
        return self.config.data.seq_len or default_seq_len(self.model)

    @property
    def local_seq_len(self) -> int:
        """Tokens that a rank has of each sequence."""
        return self.seq_len // self.config.sharding.context_parallel

    @property
    def data_ranks(self) -> int:
        """Ranks that read different sequences."""
        return self.config.sharding.data_ranks(self.world_size)

    @property
    def batch_per_micro_batch(self) -> int:
        """Sequences that all ranks read at a time."""
        return self.config.data.micro_batch * self.data_ranks

    @property
    def accumulation(self) -> int:
        """Micro-batches per step; meaningless where the batch does not divide."""
        return (self.config.data.global_batch or 0) // self.batch_per_micro_batch


Rule = Callable[[Setting], Iterator[str]]
