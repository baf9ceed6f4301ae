"""A step with a NaN in one rank's gradients changes nothing on any rank, under any strategy."""

import pytest
from harness import Results, run_ranks, write_text
from nonfinite_rank import CASES, POISONED, STEPS


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("nonfinite")
    text = write_text(folder / "text.txt")
    return Results.of(folder, run_ranks((2, "nonfinite_rank", text, folder)))


@pytest.mark.parametrize("name", CASES)
def test_as_if_the_step_had_not_been(name: str, found: Results) -> None:
    result = found.get(name=name)
    expected = [True] * STEPS
    expected.insert(POISONED, False)
    assert result["applied"] == expected
    assert result["disturbed"] == pytest.approx(result["plain"], rel=1e-6)
    assert result["plain"][-1] < result["plain"][0]
