"""Refusals: choices that are incompatible, as one ordered list of rules.

A rule is a pure function of a `Setting`. It yields a sentence, with the value and the fix, for each
condition that applies. Each file here ends with its rules in order, and `resolve` asks one file
after the other: a run is refused with the first sentence of the first rule. `shardscale matrix`
prints its table of compatibility from the same list.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

from launcher.config.schema import RunConfig
from launcher.model.config import ModelConfig

LONGEST_BY_DEFAULT = 4096


def default_seq_len(model: ModelConfig) -> int:
    """Return the default tokens per sequence: the context, but at most 4096."""
    return min(model.context, LONGEST_BY_DEFAULT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A config with all defaults filled in, compatible or not, and where it would run."""

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
        """Tokens of each sequence on one rank."""
        return self.seq_len // self.config.sharding.context_parallel

    @property
    def data_ranks(self) -> int:
        """Ranks that read different sequences."""
        return self.config.sharding.data_ranks(self.world_size)

    @property
    def batch_per_micro_batch(self) -> int:
        """Sequences that all ranks read at once."""
        return self.config.data.micro_batch * self.data_ranks

    @property
    def accumulation(self) -> int:
        """Micro-batches per step; meaningless where the batch does not divide."""
        return (self.config.data.global_batch or 0) // self.batch_per_micro_batch

    def changed(self, **changes: Any) -> Self:
        """Return it with fields of its config changed."""
        return replace(self, config=self.config.replace(**changes))


Rule = Callable[[Setting], Iterator[str]]
