"""A run goes on from anybody's checkpoint as if it had been its own.

One process group per number of ranks saves all cases, another one loads them all; each test then
looks up its own pair.
"""

import pytest
from checkpoint_cases import AFTER, BEFORE, BY_NAME, CASES, PAIRS, Case
from harness import Results, run_ranks, write_text


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("checkpoints")
    text = write_text(folder / "text.txt")
    groups = []
    for mode, ranks in (("save", 1), ("save", 2), ("both", 4), ("load", 1), ("load", 2)):
        names = [case.name for case in CASES if case.ranks == ranks]
        groups.append((ranks, "checkpoint_rank", mode, text, folder, *names))
    return Results.of(folder, run_ranks(*groups))


@pytest.mark.parametrize(("saver", "loader"), PAIRS, ids=lambda case: case.name)
def test_goes_on_as_the_saver_did(saver: Case, loader: Case, results: Results) -> None:
    expected = results.get(**{"name": saver.name, "from": None})["after"]
    got = results.get(**{"name": loader.name, "from": saver.name})["after"]
    low = saver.family == "bf16"
    assert len(got["losses"]) == len(got["norms"]) == AFTER
    assert got["losses"] == pytest.approx(expected["losses"], rel=2e-2 if low else 2e-5)
    if not low:
        assert got["norms"] == pytest.approx(expected["norms"], rel=1e-3)
    if saver == loader:  # nothing is lost on the way, not one bit
        assert got == expected


@pytest.mark.parametrize("saver", CASES, ids=lambda case: case.name)
def test_every_element_is_written_once(saver: Case, results: Results) -> None:
    saved = results.get(**{"name": saver.name, "from": None})
    payload = 12 * saved["parameters"]
    assert payload < saved["size_bytes"] < payload + 100 * 3 * 20 * saver.ranks
    files = sorted((results.folder / saver.name / f"step-{BEFORE:08d}").glob("rank-*.safetensors"))
    assert len(files) == saver.ranks
    # The headers are most of what is above an even share in a model as small as this.
    assert max(f.stat().st_size for f in files) < 1.2 * payload / saver.ranks + 100 * 3 * 20


def test_generators_go_on_where_the_ranks_are_the_same(results: Results) -> None:
    for saver, loader in PAIRS:
        loaded = results.get(**{"name": loader.name, "from": saver.name})
        assert loaded["rng_restored"] == (saver.ranks == loader.ranks)


def test_training_is_not_what_makes_the_checkpoints_equal(results: Results) -> None:
    """The steps after the save would show a state that was not restored."""
    run = results.get(**{"name": next(iter(BY_NAME)), "from": None})
    assert run["after"]["losses"][0] < 0.95 * run["before"]["losses"][0]
