"""Decoders of transformers train like a plain loop of transformers and torch, however sharded."""

import pytest
from foreign_cases import ADAPTED, BOTH, CASES, GIVEN, MEASURED, MESHED, RESUMED, USERS, Case
from harness import Results, run_ranks, selected, write_text

ALONE = {case.architecture: case for case in CASES}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Runs the selected cases, and what each is held against."""
    folder = tmp_path_factory.mktemp("foreign")
    write_text(folder / "text.txt")
    asked = [params.get("case") for params in selected(request)]
    groups = [
        [ranks, "foreign_rank", folder, *(c.name for c in cases if None in asked or c in asked)]
        for ranks, cases in ((2, (*CASES, *GIVEN, *ADAPTED)), (4, MESHED))
    ]
    return Results.of(folder, run_ranks(*(g for g in groups if len(g) > 3)))


@pytest.mark.parametrize("case", [*CASES, *MESHED], ids=lambda case: case.name)
def test_sharded_like_a_plain_loop(case: Case, results: Results) -> None:
    plain = results.get(plain=case.architecture, accumulation=case.accumulation)["losses"]
    losses = results.get(name=case.name)["losses"]
    assert losses == pytest.approx(plain, rel=case.tolerance)
    assert plain[-1] < plain[0]


@pytest.mark.parametrize("architecture", ALONE)
def test_one_process_like_a_plain_loop(architecture: str, results: Results) -> None:
    case = ALONE[architecture]
    plain = results.get(plain=architecture, accumulation=case.accumulation)["losses"]
    close = 5e-6 if "optimizer" in case.changes else 1e-6
    assert results.get(single=architecture)["losses"] == pytest.approx(plain, rel=close)


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: case.name)
def test_its_bytes_are_predicted(case: Case, results: Results) -> None:
    counted = results.get(counted=case.name)
    assert counted["predicted"] == pytest.approx(counted["measured"], rel=0.01)


@pytest.mark.parametrize("case", RESUMED, ids=lambda case: case.name)
def test_it_goes_on_under_another_strategy(case: Case, results: Results) -> None:
    plain = results.get(plain=case.architecture, accumulation=case.accumulation)["losses"]
    second_half = plain[len(plain) // 2 :]
    assert results.get(resumed=case.name)["losses"] == pytest.approx(second_half, rel=2e-5)


@pytest.mark.parametrize("case", [*GIVEN, *ADAPTED], ids=lambda case: case.name)
def test_a_folders_weights_train_like_a_plain_loop_from_them(case: Case, results: Results) -> None:
    plain = results.get(plain_given=case.name)["losses"]
    assert results.get(given=case.name)["losses"] == pytest.approx(plain, rel=2e-5)
    single = results.get(single_given=case.name, decoder="transformers")["losses"]
    assert single == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize(
    "case", [c for c in GIVEN if c.architecture in BOTH], ids=lambda case: case.name
)
def test_both_decoders_train_alike_from_one_folder(case: Case, results: Results) -> None:
    theirs, ours = (
        results.get(single_given=case.name, decoder=decoder)["losses"]
        for decoder in ("transformers", "own")
    )
    assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("case", GIVEN, ids=lambda case: case.name)
def test_exported_weights_have_the_type_that_they_began_with(case: Case, results: Results) -> None:
    exported = results.get(exported=case.name)
    assert exported["dtype"] == "torch.bfloat16"
    assert exported["differing"] == []


@pytest.mark.parametrize(
    "case", [case for case in RESUMED if case.architecture != USERS], ids=lambda case: case.name
)
def test_transformers_loads_what_a_sharded_run_exports(case: Case, results: Results) -> None:
    assert results.get(saved=case.name)["differing"] == []


@pytest.mark.parametrize("case", ADAPTED, ids=lambda case: case.name)
def test_peft_reads_adapters_and_merging_them_computes_the_same(
    case: Case, results: Results
) -> None:
    exported = results.get(exported=case.name)
    assert exported["difference"] < 1e-5
    assert exported["learnt"] > 1e-3
    assert exported["differing"] == []  # read as ours again
