"""Predicted against really allocated tensors of rank 0, at world sizes that nobody has here."""

import json
from typing import Any

import pytest
from harness import HERE, python
from plan_cases import CASES, SIZES

LINES = (
    *("params_bytes", "master_bytes", "masks_bytes"),
    *("grads_bytes", "optimizer_bytes", "buffers_bytes"),
)
PAIRS = [(size, name) for size, names in SIZES.items() for name in names]

# Beside an offloaded optimizer a CPU has no other place for the gradients whose norm is taken.
ON_DEVICE = [pair for pair in PAIRS if "offload" not in pair[1]]


@pytest.fixture(scope="module")
def compared() -> dict[tuple[int, str], dict[str, Any]]:
    """(world size, case) -> what the pretended rank found."""
    asked = [",".join([str(size), *names]) for size, names in SIZES.items()]
    done = python(HERE / "plan_rank.py", *asked)
    assert done.returncode == 0, done.stderr
    results = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    return {(result["size"], result["name"]): result for result in results}


@pytest.mark.parametrize(("size", "name"), PAIRS)
def test_peak(size: int, name: str, compared: dict[tuple[int, str], dict[str, Any]]) -> None:
    result = compared[size, name]
    assert result["predicted_bytes"] == pytest.approx(result["measured_bytes"], rel=0.005)


@pytest.mark.parametrize(("size", "name"), ON_DEVICE)
def test_peak_of_the_update(
    size: int, name: str, compared: dict[tuple[int, str], dict[str, Any]]
) -> None:
    result = compared[size, name]
    # a clipped norm and the like, on each rank and from each rank
    expected = pytest.approx(result["measured_step_bytes"], rel=0.0005, abs=8 * size)
    assert result["predicted_step_bytes"] == expected


@pytest.mark.parametrize(("size", "name"), PAIRS)
def test_held_states_are_exact(
    size: int, name: str, compared: dict[tuple[int, str], dict[str, Any]]
) -> None:
    result = compared[size, name]
    assert [result["predicted_held"][line] for line in LINES] == [
        result["measured_held"][line] for line in LINES
    ]


def test_every_case_runs_somewhere() -> None:
    assert {name for _, name in PAIRS} == set(CASES)
