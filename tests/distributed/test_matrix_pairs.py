"""Each pair that docs/matrix.md marks as running trains like the plain single process.

One process group runs them all; each test then looks up its own. What runs on GPUs only is in
tests/gpu.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from harness import HERE, torchrun, write_text
from matrix_cases import CASES, STEPS, Case
from test_offload_nvme import pytestmark as needs_nvme


@dataclass(frozen=True, kw_only=True)
class Results:
    """What the process group reported: run -> losses, norms and graphs, or an error."""

    by_run: dict[str, dict[str, Any]]
    output: str

    def of(self, case: Case) -> dict[str, Any]:
        if case.run not in self.by_run:
            pytest.fail(f"the process group ended before {case.name}:\n{self.output[-4000:]}")
        result = self.by_run[case.run]
        if "error" in result:
            pytest.fail(f"{case.name} raised:\n{result['error']}")
        return result


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Runs the selected cases that can run here, and what they are compared with."""
    folder: Path = tmp_path_factory.mktemp("matrix")
    text = write_text(folder / "text.txt")
    selected = [
        cast(Case, item.callspec.params["case"])
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and (item.module, item.originalname) == (request.module, "test_like_one_process")
        and not any(mark.args[0] for mark in item.iter_markers("skipif"))
    ]
    runs = dict.fromkeys(c.run for case in selected for c in (case.reference, case))
    # Each rank compiles by itself: a pool of compilers would start on top of both.
    once = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = torchrun(2, HERE / "matrix_rank.py", text, folder, *runs, **once)
    lines = [
        line for path in folder.glob("results-*.jsonl") for line in path.read_text().splitlines()
    ]
    return Results(by_run={r["run"]: r for r in map(json.loads, lines)}, output=done.stderr)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=needs_nvme if "nvme_path" in case.changes else ()) for case in CASES],
    ids=lambda case: case.name,
)
def test_like_one_process(case: Case, results: Results) -> None:
    got, expected = results.of(case), results.of(case.reference)
    assert len(got["losses"]) == len(got["norms"]) == STEPS
    assert expected["losses"][-1] < 0.9 * expected["losses"][0]
    assert got["losses"] == pytest.approx(expected["losses"], rel=case.tolerance)
    if case.tolerance < 1e-3:
        assert got["norms"] == pytest.approx(expected["norms"], rel=1e-3)
    # What cannot be compiled is run as it is, with a line in a log.
    assert bool(got["graphs"]) == case.changes.get("compile", False)
