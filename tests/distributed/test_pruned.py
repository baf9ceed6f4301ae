"""Pruned weights stay exactly zero, and training is that of a single process, under every way of
sharding; each goes on from another one's checkpoint with the same masks."""

from typing import Any

import pytest
from harness import Results, run_ranks, selected, train, verb, write_text
from pruned_cases import (
    FEW_STEPS,
    OTHERS,
    RANKS,
    REFERENCE,
    SAVED,
    SHAPE,
    STEPS,
    VARIANTS,
    Case,
)

TOLERANCE = 2e-5
MASKED = 2 * (45 * 15 + 15 * 15 + 2 * 60 * 15)
"""Weights of both blocks' projections."""


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results by case and act, from one process group for all selected cases and one process for
    the reference."""
    folder = tmp_path_factory.mktemp("pruned")
    text, dense, pruned = write_text(folder / "text.txt"), folder / "dense", folder / "half"
    training = (*SHAPE, f"--data={text}", "--steps=20", "--lr=3e-3", "--test-batches=0")
    trained = train(1, *training, f"--out={dense}")
    assert trained.returncode == 0, trained.stderr
    made = verb("prune", dense, f"--out={pruned}", "--device=cpu")
    assert made.returncode == 0, made.stderr
    asked: list[Case] = [params["case"] for params in selected(request)]
    names = list(dict.fromkeys(case.name for case in asked))
    if any(case in VARIANTS for case in asked):
        names = list(dict.fromkeys([*(case.name for case in VARIANTS), *names]))
    given = (text, pruned, folder)
    alone = (1, "pruned_rank", *given, REFERENCE.name)
    together = (RANKS, "pruned_rank", *given, *names)
    return Results.of(folder, run_ranks(alone, together))


def check_ranks(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        assert rank["pruned_elements"] > 0, number
        assert rank["pruned_nonzero"] == 0, (number, rank)
        assert rank["kept_nonzero"] > 0.9 * rank["pruned_elements"], (number, rank)
        assert rank["wrong_bits"] == 0, (number, rank)
        assert rank["held"] == rank["predicted"], number


@pytest.mark.parametrize("case", VARIANTS, ids=lambda case: case.name)
def test_a_pruned_model_trains_on_as_in_one_process(case: Case, results: Results) -> None:
    alone, result = (results.get(name=one.name, act="begin") for one in (REFERENCE, case))
    assert len(alone["losses"]) == STEPS
    assert alone["losses"][-1] < alone["losses"][0]
    assert result["losses"] == pytest.approx(alone["losses"], abs=TOLERANCE)
    check_ranks(result["ranks"])


@pytest.mark.parametrize("case", VARIANTS, ids=lambda case: case.name)
def test_masks_go_from_one_strategy_to_another(case: Case, results: Results) -> None:
    alone = results.get(name=REFERENCE.name, act="begin")
    result = results.get(name=case.name, act="resume")
    expected = alone["losses"][SAVED : SAVED + FEW_STEPS]
    assert result["losses"] == pytest.approx(expected, abs=TOLERANCE)
    check_ranks(result["ranks"])


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_other_ways_to_train_keep_the_zeros(case: Case, results: Results) -> None:
    check_ranks(results.get(name=case.name, act="begin")["ranks"])


def test_masks_are_a_bit_for_each_weight(results: Results) -> None:
    (alone,) = results.get(name=REFERENCE.name, act="begin")["ranks"]
    check_ranks([alone])
    assert alone["pruned_elements"] == pytest.approx(MASKED / 2, abs=4)
    masks_bytes = alone["held"][2]
    assert MASKED / 8 <= masks_bytes < MASKED / 8 + 8  # a matrix ends inside a byte
