"""Ring attention, forward and backward, is causal attention over the whole sequence.

All cases run in one process group of four ranks, in rings of one, two and four; each test looks
up its own."""

import pytest
from harness import Results, run_ranks, selected
from ring_rank import CASES, TOLERANCES, WORLD_SIZE, Case


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Errors of every rank; runs the selected cases, and no others."""
    folder = tmp_path_factory.mktemp("ring")
    names = [params["case"].name for params in selected(request)]
    return Results.of(folder, run_ranks((WORLD_SIZE, "ring_rank", folder, *names)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_like_attention_over_the_whole_sequence(case: Case, results: Results) -> None:
    result = results.get(name=case.name)
    assert len(result["errors"]) == WORLD_SIZE
    for errors in result["errors"]:
        assert errors == pytest.approx(dict.fromkeys(errors, 0.0), abs=TOLERANCES[case.dtype])
