"""Published runs: their commands are accepted, and predicted seconds stay as true as is said."""

import json
from pathlib import Path

import pytest
from published import known_results
from published_pairs import one_choice, ordered, pairs_of
from published_plan import Planned, planned, planned_seconds
from published_rows import Row, published_rows
from published_tables import EXPLAINED_FROM, accuracy_page, explanations, figures

from launcher.config.resolve import resolve
from launcher.config.schema import RunConfig
from launcher.forecast.predict import predict

BENCH = Path(__file__).parents[3] / "bench"
GIB = 2**30
ROWS = {row.key: row for row in published_rows()}
RESULTS = known_results(BENCH / "results" / "published.json")


BEFORE = [(row, RESULTS[key]) for key, row in ROWS.items()]


@pytest.fixture(scope="module")
def now() -> list[tuple[Row, Planned]]:
    """Every fourth row that is no constant's source, and those of pairs; seconds as planned now.

    `bench/published.py` plans all of them.
    """
    paired = {key for pair in pairs_of(BEFORE, "seconds") for key in pair.keys}
    some = {key for key, row in ROWS.items() if not row.fits_constants and key not in paired}
    taken = paired | set(sorted(some)[2::4])
    return [(row, planned_seconds(row, before)) for row, before in BEFORE if row.key in taken]


def test_rows_are_split_by_their_names_alone() -> None:
    to_fit = {key for key, row in ROWS.items() if row.fits_constants}
    assert "torchtitan-8b-x8-bf16" in to_fit
    assert "torchtitan-8b-x8-fp8-compile" not in to_fit
    assert 0.4 < len(to_fit) / len(ROWS) < 0.6


def test_every_row_has_been_planned_and_none_is_refused() -> None:
    assert set(ROWS) == set(RESULTS)
    assert [plan.refused for plan in RESULTS.values() if plan.refused] == []


def test_a_row_is_planned_by_its_command() -> None:
    row = ROWS["mpt-125m-a100_40gb-bf16-full_shard-x8-t512-b104x3"]
    plan, before = planned(row), RESULTS[row.key]
    assert plan.verdict == "fits"
    assert plan.planned_reserved_bytes == pytest.approx(before.planned_reserved_bytes, rel=0.05)
    assert plan.planned_step_s == pytest.approx(
        planned_seconds(row, before).planned_step_s, rel=1e-6
    )


def test_seconds_of_rows_that_check(now: list[tuple[Row, Planned]]) -> None:
    ratios = [
        figure.ratio
        for figure in figures(now)
        if figure.kind == "seconds" and not figure.row.fits_constants and not figure.unlike
    ]
    assert len(ratios) > 40
    assert sum(1 / 1.25 <= ratio <= 1.25 for ratio in ratios) >= 0.85 * len(ratios)
    assert min(ratios) > 1 / 1.3


def test_bytes_of_rows_that_check_and_what_explains_them() -> None:
    some = [figure for figure in figures(BEFORE) if figure.kind != "seconds" and not figure.unlike]
    off = sorted(abs(f.ratio - 1) for f in some if not f.row.fits_constants)
    assert off[len(off) // 2] <= 0.08
    assert off[int(0.95 * len(off))] <= 0.25
    known = explanations()
    unexplained = [
        figure.row.key
        for figure in some
        if abs(figure.ratio - 1) > EXPLAINED_FROM and figure.row.key not in known
    ]
    assert unexplained == []


def test_what_ran_is_said_to_run() -> None:
    wrong = [
        row.key
        for row, plan in BEFORE
        if row.runs is not None and (plan.verdict != "does not fit") != row.runs
    ]
    assert wrong == []


# Of bytes, torch 2.13 reserves more for a compiled 7B that recomputes than for the eager one, as is
# planned; torch of March 2024 reserved 7% less, in two of these pairs.
@pytest.mark.parametrize(("kind", "least"), [("bytes", 0.85), ("seconds", 0.8)])
def test_pairs_are_in_the_published_order(
    now: list[tuple[Row, Planned]], kind: str, least: float
) -> None:
    pairs = pairs_of(BEFORE if kind == "bytes" else now, kind)
    assert len(pairs) > 15
    assert sum(map(ordered, pairs)) >= least * len(pairs)


def test_a_pair_differs_in_one_choice() -> None:
    eager, compiled = ROWS["torchtitan-8b-x8-bf16"], ROWS["torchtitan-8b-x8-bf16-compile"]
    assert one_choice(eager, compiled) == "compile"
    assert one_choice(eager, eager) is None
    assert one_choice(eager, ROWS["torchtitan-8b-x8-fp8-compile"]) is None


def test_the_page_is_what_the_results_say() -> None:
    page = BENCH.parent / "docs" / "accuracy.md"
    assert page.read_text(encoding="utf-8") == accuracy_page(BEFORE)
    stored = json.loads((BENCH / "results" / "published.json").read_text(encoding="utf-8"))
    assert len(stored["rows"]) == len(ROWS)


@pytest.mark.parametrize(
    ("flags", "published_gib", "logits_copies"),
    [
        ({"precision": "fp32"}, 32.4, 1),
        ({"precision": "fp32", "activation_checkpointing": "full"}, 14.2, 0),
    ],
    ids=["keeps everything", "recomputes"],
)
def test_dropout_keeps_masks_of_a_byte_and_no_scores(
    flags: dict[str, str], published_gib: float, logits_copies: int
) -> None:
    """The study's runs. Its loss holds log-probabilities beside the logits, where ours writes over
    them: one copy more where the loss is the highest moment."""
    config = RunConfig().replace(
        model="seed-134m",
        dropout=0.4,
        optimizer="adam",
        strategy="single",
        micro_batch=125,
        global_batch=125,
        seq_len=256,
        loss_chunk=0,
        attention="sdpa",
        **flags,
    )
    run = resolve(config, world_size=1, device_type="cuda")
    peak = predict(run).peak_bytes
    logits = 125 * 256 * run.model.vocab_size * 4
    assert (peak + logits_copies * logits) / GIB == pytest.approx(published_gib, rel=0.06)
