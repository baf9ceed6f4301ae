"""Same seed, same data, same losses: every way of sharding trains like one process.

The cases that need the same number of ranks run one after the other in one process group; each
test then looks up its own.
"""

import json
from dataclasses import dataclass
from typing import cast

import pytest
from harness import HERE, torchrun, write_examples, write_text
from parity_cases import CASES, Case, references


@dataclass(frozen=True, kw_only=True)
class Results:
    """What the process groups reported: case name -> losses and norms, or an error."""

    by_name: dict[str, dict[str, list[float]]]
    output: str

    def of(self, name: str) -> dict[str, list[float]]:
        if name not in self.by_name:
            pytest.fail(f"the process group ended before {name}:\n{self.output[-4000:]}")
        result = self.by_name[name]
        if "error" in result:
            pytest.fail(f"{name} raised:\n{result['error']}")
        return result


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Runs the selected cases, and no others."""
    folder = tmp_path_factory.mktemp("parity")
    text = write_text(folder / "text.txt")
    write_examples(folder / "examples.jsonl")
    selected = [
        cast(Case, item.callspec.params["case"])
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and (item.module, item.originalname) == (request.module, "test_like_one_process")
    ]
    wanted = {ranks: [c.name for c in selected if c.ranks == ranks] for ranks in (1, 2, 4)}
    wanted[1] = [case.name for case in references()] + wanted[1]
    output = ""
    for ranks, names in wanted.items():
        if names:
            done = torchrun(ranks, HERE / "parity_rank.py", text, folder / "results.jsonl", *names)
            output += f"{ranks} ranks ended with {done.returncode}:\n{done.stderr}\n"
    lines = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    return Results(by_name={r["name"]: r for r in map(json.loads, lines)}, output=output)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_like_one_process(case: Case, results: Results) -> None:
    got, expected = results.of(case.name), results.of(case.reference)
    assert len(got["losses"]) == len(got["norms"]) == case.steps
    losses, norms = (expected[kind][: case.steps] for kind in ("losses", "norms"))
    assert got["losses"] == pytest.approx(losses, rel=case.loss_tolerance)
    if case.norm_tolerance is not None:
        assert got["norms"] == pytest.approx(norms, rel=case.norm_tolerance)


@pytest.mark.parametrize("name", [case.name for case in references() if not case.masked])
def test_the_reference_learns_and_clipping_matters(name: str, results: Results) -> None:
    reference = results.of(name)
    # Adapters have little to say beside an embedding that nobody has trained.
    enough = 0.99 if name.startswith("lora") else 0.9
    assert reference["losses"][-1] < enough * reference["losses"][0]
    assert min(reference["norms"]) > 0.5  # what the clipped cases clip to
