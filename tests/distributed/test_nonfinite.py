"""A step with a NaN in one rank's gradients changes nothing on any rank, under any strategy."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness import HERE, torchrun, write_text
from nonfinite_rank import CASES, POISONED, STEPS


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("nonfinite")
    text = write_text(folder / "text.txt")
    done = torchrun(2, HERE / "nonfinite_rank.py", text, folder / "found.json")
    assert done.returncode == 0, done.stderr
    results: dict[str, dict[str, Any]] = json.loads((folder / "found.json").read_text())
    return results


@pytest.mark.parametrize("name", CASES)
def test_as_if_the_step_had_not_been(name: str, found: dict[str, dict[str, Any]]) -> None:
    result = found[name]
    expected = [True] * STEPS
    expected.insert(POISONED, False)
    assert result["applied"] == expected
    assert result["disturbed"] == pytest.approx(result["plain"], rel=1e-6)
    assert result["plain"][-1] < result["plain"][0]
