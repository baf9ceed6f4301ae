"""Which candidate a plan recommends: the simplest of those that are equally fast."""

import pytest

from launcher.config.schema import RunConfig
from launcher.forecast.efficiency import LEAST_OF_PREDICTED, MOST_OF_PREDICTED
from launcher.forecast.fit import Verdict
from launcher.forecast.order import Merit, Simplicity, best_first, outdone, simplicity, ties

JUST_TIED = 1.01 * LEAST_OF_PREDICTED / MOST_OF_PREDICTED
"""Share of the fastest one's speed that still overlaps with it."""


def merit(
    speed: float, simplicity: Simplicity, verdict: Verdict = "fits", used_bytes: int = 1
) -> Merit:
    return Merit(verdict=verdict, tokens_per_s=speed, used_bytes=used_bytes, simplicity=simplicity)


def test_among_ties_the_simplest_is_first() -> None:
    assert best_first([merit(1.0, (1,)), merit(JUST_TIED, (0,)), merit(0.9, (2,))]) == [1, 0, 2]


def test_ties_are_with_the_fastest_and_not_with_each_other() -> None:
    # The third overlaps with the second only.
    speeds = (1.0, JUST_TIED, JUST_TIED**2)
    assert ties(speeds[1], speeds[2])
    assert best_first([merit(s, (2 - n,)) for n, s in enumerate(speeds)]) == [1, 0, 2]


def test_what_fits_comes_before_what_is_tight_or_does_not_fit() -> None:
    merits = [
        merit(9.0, (0,), "does not fit", used_bytes=7),
        merit(9.0, (0,), "does not fit", used_bytes=5),
        merit(5.0, (0,), "tight"),
        merit(1.0, (9,)),
    ]
    assert best_first(merits) == [3, 2, 1, 0]


def test_a_candidate_is_left_out_only_where_it_cannot_win() -> None:
    assert outdone(0.9, (1,), [(1.0, (1,))])
    assert not outdone(0.9, (0,), [(1.0, (1,))])  # it is simpler, and as fast
    assert outdone(0.5, (0,), [(1.0, (1,))])
    assert not outdone(1.1, (5,), [(1.0, (0,))])


@pytest.mark.parametrize(
    ("simpler", "other"),
    [
        ({"strategy": "single"}, {"strategy": "ddp"}),
        ({"strategy": "ddp"}, {"strategy": "zero", "zero": 1}),
        ({"strategy": "zero", "zero": 1}, {"strategy": "zero", "zero": 2}),
        ({"strategy": "zero", "zero": 2}, {"strategy": "zero", "zero": 3}),
        (
            {"strategy": "zero", "zero": 3},
            {"strategy": "zero", "zero": 1, "offload_optimizer": "cpu"},
        ),
        (
            {"strategy": "zero", "zero": 3, "offload_optimizer": "cpu"},
            {"strategy": "zero", "zero": 3, "offload_optimizer": "nvme"},
        ),
        ({"strategy": "zero", "zero": 3}, {"strategy": "ddp", "tensor_parallel": 2}),
        ({"strategy": "ddp"}, {"strategy": "ddp", "activation_checkpointing": "selective"}),
        (
            {"strategy": "ddp", "activation_checkpointing": "selective"},
            {"strategy": "ddp", "activation_checkpointing": "full"},
        ),
        ({"strategy": "fsdp"}, {"strategy": "fsdp", "reduce_each_micro_batch": True}),
    ],
    ids=lambda fields: " ".join(f"{name}={value}" for name, value in fields.items()),
)
def test_fewer_and_milder_techniques_are_simpler(
    simpler: dict[str, object], other: dict[str, object]
) -> None:
    one, two = (simplicity(RunConfig().replace(**fields)) for fields in (simpler, other))
    assert one < two
