"""Ring attention, forward and backward, is causal attention over the whole sequence.

All cases run in one process group of four ranks, in rings of one, two and four; each test looks
up its own."""

import json
from typing import Any, cast

import pytest
from harness import HERE, torchrun
from ring_rank import CASES, TOLERANCES, WORLD_SIZE, Case


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Case name -> errors of every rank; runs the selected cases, and no others."""
    selected = [
        cast(Case, item.callspec.params["case"]).name
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
    ]
    path = tmp_path_factory.mktemp("ring") / "results.jsonl"
    done = torchrun(WORLD_SIZE, HERE / "ring_rank.py", path, *selected)
    assert done.returncode == 0, done.stderr
    return {r["name"]: r for r in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_like_attention_over_the_whole_sequence(case: Case, results: dict[str, Any]) -> None:
    result = results[case.name]
    assert "error" not in result, result["error"]
    assert len(result["errors"]) == WORLD_SIZE
    for errors in result["errors"]:
        assert errors == pytest.approx(dict.fromkeys(errors, 0.0), abs=TOLERANCES[case.dtype])
