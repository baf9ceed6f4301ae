"""Order of candidates: fastest first, and the simplest first among those whose ranges overlap.

The table, its page, the calculator and the suggestions after out of memory all rank with it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from launcher.config.schema import RunConfig
from launcher.forecast.efficiency import LEAST_OF_PREDICTED, MOST_OF_PREDICTED
from launcher.forecast.fit import Verdict
from launcher.strategies import variant_of

Simplicity = tuple[int, ...]
"""Compares as less where a configuration is simpler."""
VERDICTS: Final[tuple[Verdict, ...]] = ("fits", "tight", "does not fit")
_OFFLOADS: Final = ("none", "cpu", "nvme")
_RECOMPUTES: Final = {"none": 0, "selective": 1, "full": 3, "offload": 4}
_RECOMPUTES_SOME: Final = 2  # every=K, keep=..., budget=...


@dataclass(frozen=True, kw_only=True, slots=True)
class Merit:
    """Ranking criteria of a candidate."""

    verdict: Verdict
    tokens_per_s: float
    used_bytes: int
    simplicity: Simplicity


def simplicity(config: RunConfig) -> Simplicity:
    """Return the sort key of a configuration from simple to complex.

    Offload weighs most: it needs the host's memory and CPU. Then context and tensor parallelism,
    which communicate in every block; then the strategy, other techniques, and recomputation.
    """
    sharding, model = config.sharding, config.model
    offloads = [
        _OFFLOADS.index(place) for place in (sharding.offload_optimizer, sharding.offload_param)
    ]
    cuts = [ranks > 1 for ranks in sharding.model_parallel.values()]
    techniques = (
        sharding.reduce_each_micro_batch,
        model.lora_rank is not None,
        model.quantize_base != "none",
    )
    return (
        max(offloads),
        sum(offloads),
        sum(cuts),
        variant_of(config).complexity,
        sum(techniques),
        _RECOMPUTES.get(model.activation_checkpointing, _RECOMPUTES_SOME),
    )


def ties(one: float, other: float) -> bool:
    """Return whether the ranges of two predicted speeds overlap."""
    return max(one, other) * LEAST_OF_PREDICTED <= min(one, other) * MOST_OF_PREDICTED


def best_first(merits: Sequence[Merit]) -> list[int]:
    """Return indices of the candidates: fitting ones, tight ones, then the rest by missing memory.

    Overlap is not transitive. So the fastest is the reference of all that overlap with it, which
    are sorted by simplicity; the fastest of the rest is the next reference.
    """
    order: list[int] = []
    for verdict in VERDICTS[:-1]:
        left = [number for number, merit in enumerate(merits) if merit.verdict == verdict]
        left.sort(key=lambda number: (-merits[number].tokens_per_s, merits[number].used_bytes))
        while left:
            fastest = merits[left[0]].tokens_per_s
            tied = [number for number in left if ties(merits[number].tokens_per_s, fastest)]
            order += sorted(tied, key=lambda number: merits[number].simplicity)
            left = left[len(tied) :]  # sorted by speed: those that tie with the fastest come first
    return order + _least_missing(merits)


def _least_missing(merits: Sequence[Merit]) -> list[int]:
    """Sort what does not fit; of those that need the same, more recomputation comes first."""
    rest = [number for number, merit in enumerate(merits) if merit.verdict == VERDICTS[-1]]
    return sorted(
        rest, key=lambda number: (merits[number].used_bytes, -merits[number].simplicity[-1])
    )


def outdone(
    most_tokens_per_s: float,
    complexity: Simplicity,
    fitting: Iterable[tuple[float, Simplicity]],
) -> bool:
    """Return whether a candidate ranks behind one of `fitting` at any micro-batch.

    Args:
        most_tokens_per_s: upper bound of its speed.
        complexity: its simplicity key.
        fitting: (tokens per second, simplicity) of candidates that fit.
    """
    return any(
        # a simpler candidate ranks before a faster one that its range overlaps
        speed > most_tokens_per_s and (other <= complexity or not ties(speed, most_tokens_per_s))
        for speed, other in fitting
    )
