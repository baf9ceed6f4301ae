"""`--memory-trace` against the allocator's own events and against saved-tensor hooks."""

import pytest
from harness import Results, run_ranks, write_text
from trace_rank import STRATEGIES

WITHIN = 0.01


@pytest.fixture(scope="module", params=[2, 4])
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results of each rank for each strategy, on 2 and on 4 ranks."""
    folder = tmp_path_factory.mktemp("trace")
    text = write_text(folder / "text.txt")
    return Results.of(folder, run_ranks((request.param, "trace_rank", text, folder)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_lines_add_up_to_the_true_peak(compared: Results, strategy: str) -> None:
    for rank in compared.get(name=strategy)["ranks"]:
        lines = {name: size for name, size in rank["ledger"].items() if size is not None}
        used = lines.pop("used_bytes")
        assert sum(lines.values()) == used
        assert used == pytest.approx(rank["true_peak_bytes"], rel=WITHIN)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_activations_are_what_autograd_saved(compared: Results, strategy: str) -> None:
    for rank in compared.get(name=strategy)["ranks"]:
        activations = rank["ledger"]["activations_bytes"]
        assert activations == pytest.approx(rank["saved_bytes"], rel=WITHIN)
