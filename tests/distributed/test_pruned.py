"""Pruned weights stay exactly zero, and training is that of a single process, under every way of
sharding; each goes on from another one's checkpoint with the same masks."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness import HERE, python, torchrun, write_text
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
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], dict[str, Any]]:
    """(case, begin or resume) -> what was found, from one process group for all selected cases."""
    folder = tmp_path_factory.mktemp("pruned")
    text, dense, pruned = write_text(folder / "text.txt"), folder / "dense", folder / "half"
    training = (*SHAPE, f"--data={text}", "--steps=20", "--lr=3e-3", "--test-batches=0")
    trained = python("-m", "launcher", "train", *training, f"--out={dense}")
    assert trained.returncode == 0, trained.stderr
    made = python("-m", "launcher", "prune", dense, f"--out={pruned}", "--device=cpu")
    assert made.returncode == 0, made.stderr
    asked = [
        i.callspec.params
        for i in request.session.items
        if i.path == Path(__file__) and hasattr(i, "callspec")
    ]
    names = list(dict.fromkeys(case.name for params in asked for case in params.values()))
    if any(case in VARIANTS for params in asked for case in params.values()):
        names = list(dict.fromkeys([*(case.name for case in VARIANTS), *names]))
    script = HERE / "pruned_rank.py"
    for done in (
        python(script, text, pruned, folder, REFERENCE.name),
        torchrun(RANKS, script, text, pruned, folder, *names),
    ):
        assert done.returncode == 0, done.stderr
    lines = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    return {(line["name"], line["act"]): line for line in map(json.loads, lines)}


def found(results: dict[tuple[str, str], dict[str, Any]], name: str, act: str) -> dict[str, Any]:
    result = results[name, act]
    if "error" in result:
        pytest.fail(f"{name}, {act}, raised:\n{result['error']}")
    return result


def check_ranks(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        assert rank["pruned_elements"] > 0, number
        assert rank["pruned_nonzero"] == 0, (number, rank)
        assert rank["kept_nonzero"] > 0.9 * rank["pruned_elements"], (number, rank)
        assert rank["wrong_bits"] == 0, (number, rank)
        assert rank["held"] == rank["predicted"], number


@pytest.mark.parametrize("case", VARIANTS, ids=lambda case: case.name)
def test_a_pruned_model_trains_on_as_in_one_process(
    case: Case, results: dict[tuple[str, str], dict[str, Any]]
) -> None:
    alone, result = (found(results, one.name, "begin") for one in (REFERENCE, case))
    assert len(alone["losses"]) == STEPS
    assert alone["losses"][-1] < alone["losses"][0]
    assert result["losses"] == pytest.approx(alone["losses"], abs=TOLERANCE)
    check_ranks(result["ranks"])


@pytest.mark.parametrize("case", VARIANTS, ids=lambda case: case.name)
def test_masks_go_from_one_strategy_to_another(
    case: Case, results: dict[tuple[str, str], dict[str, Any]]
) -> None:
    alone, result = found(results, REFERENCE.name, "begin"), found(results, case.name, "resume")
    expected = alone["losses"][SAVED : SAVED + FEW_STEPS]
    assert result["losses"] == pytest.approx(expected, abs=TOLERANCE)
    check_ranks(result["ranks"])


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_other_ways_to_train_keep_the_zeros(
    case: Case, results: dict[tuple[str, str], dict[str, Any]]
) -> None:
    check_ranks(found(results, case.name, "begin")["ranks"])


def test_masks_are_a_bit_for_each_weight(results: dict[tuple[str, str], dict[str, Any]]) -> None:
    (alone,) = found(results, REFERENCE.name, "begin")["ranks"]
    check_ranks([alone])
    assert alone["pruned_elements"] == pytest.approx(MASKED / 2, abs=4)
    masks_bytes = alone["held"][2]
    assert MASKED / 8 <= masks_bytes < MASKED / 8 + 8  # a matrix ends inside a byte
