"""Same seed, same data, same losses: every way of sharding trains like one process.

The cases that need the same number of ranks run one after the other in one process group; each
test then looks up its own.
"""

import os
import pickle
from itertools import chain, product

import pytest
from harness import Results, run_ranks, selected, write_examples, write_text
from parity_cases import APART, BUDGET, DIMENSIONS, Case, cases, drawn

from launcher.compare.sweep.matrix import TECHNIQUES, cell
from launcher.strategies import VARIANTS

PAIRED = cases()
REFERENCES = list({case.reference.name: case.reference for case in PAIRED}.values())
CASES = [*PAIRED, *drawn(int(os.environ.get("SHARDSCALE_TEST_DRAWN", "0")))]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Runs the selected cases and their references, and no others."""
    folder = tmp_path_factory.mktemp("parity")
    write_text(folder / "text.txt")
    write_examples(folder / "examples.jsonl")
    asked: list[Case] = [params["case"] for params in selected(request)]
    wanted = {case.name: case for one in asked for case in (one.reference, one)}
    groups: dict[int, list[Case]] = {1: [], 2: [], 4: []}
    for case in wanted.values():
        groups[2 if case.alone else case.ranks].append(case)
    for ranks, group in groups.items():
        (folder / f"cases-{ranks}").write_bytes(pickle.dumps(group))
    started = [(n, "parity_rank", folder / f"cases-{n}") for n, group in groups.items() if group]
    return Results.of(folder, run_ranks(*started))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_like_one_process(case: Case, results: Results) -> None:
    got, expected = results.get(name=case.name), results.get(name=case.reference.name)
    assert len(got["losses"]) == len(got["norms"]) == case.steps
    losses, norms = (expected[kind][: case.steps] for kind in ("losses", "norms"))
    assert got["losses"] == pytest.approx(losses, rel=2e-2 if case.weak else 2e-5)
    if not case.weak:
        assert got["norms"] == pytest.approx(norms, rel=1e-3)
    # What cannot be compiled is run as it is, with a line in a log.
    assert bool(got["graphs"]) == case.changes.get("compile", False)


@pytest.mark.parametrize("case", REFERENCES, ids=lambda case: case.name)
def test_the_reference_learns_and_clipping_matters(case: Case, results: Results) -> None:
    reference = results.get(name=case.name)
    # Adapters have little to say beside an embedding that nobody has trained.
    adapters = "lora_rank" in case.changes
    assert reference["losses"][-1] < (0.999 if adapters else 0.98) * reference["losses"][0]
    if "clip" not in case.changes:  # what the clipped cases clip to
        assert (max if adapters else min)(reference["norms"]) > 0.5


def test_every_technique_of_the_matrix_is_trained_under_every_strategy_that_has_it() -> None:
    paired = {*chain(*DIMENSIONS.values())}
    assert set(TECHNIQUES) <= paired | APART
    trained = {(technique, case.strategy) for case in CASES for technique in case.techniques}
    for technique, strategy in product(
        {*paired & set(TECHNIQUES), "--compile", "--memory-trace", BUDGET}, VARIANTS
    ):
        if cell(technique, strategy).cpu is None:
            assert (technique, strategy) in trained
