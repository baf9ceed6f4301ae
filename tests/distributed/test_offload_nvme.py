"""Training with states on a disk: the same losses, the same checkpoints, nothing left behind.

One process group trains all cases and exchanges their checkpoints; each test looks up its own.
DeepSpeed's I/O takes minutes to compile, so without it these tests run only where they are asked
for: `make test-nvme`.
"""

import json
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import MODEL_FLAGS as SMALL_FLAGS
from harness import TORCHRUN, environment, python, run_ranks, write_text
from offload_cases import AFTER, BEFORE, CASES, OPTIMIZER, PAIRS, PARAM, RANKS, Case

from launcher.strategies.zero import nvme_build

ASKED_FOR = "SHARDSCALE_TEST_NVME" in os.environ
nvme_build.use_own_ninja()
MISSING = nvme_build.what_is_missing()
pytestmark = [
    pytest.mark.nvme,
    pytest.mark.skipif(MISSING is not None, reason=f"needs {MISSING}: {nvme_build.INSTALL}"),
    pytest.mark.skipif(
        not ASKED_FOR,
        reason="DeepSpeed's async_io is compiled first, which takes minutes: make test-nvme",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Results:
    """Results that the process group reported: (case, checkpoint it came from) -> figures."""

    by_pair: dict[tuple[str, str | None], dict[str, Any]]
    folder: Path
    output: str

    def of(self, name: str, source: str | None = None) -> dict[str, Any]:
        if (name, source) not in self.by_pair:
            pytest.fail(f"no result of {name} from {source}:\n{self.output[-6000:]}")
        return self.by_pair[name, source]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("offload")
    text = write_text(folder / "text.txt")
    savers = [case.name for case in CASES]
    pairs = [f"{saver.name}={loader.name}" for saver, loader in PAIRS]
    done = run_ranks((RANKS, "offload_rank", text, folder, *savers, "--", *pairs))
    lines = (folder / "results-0.jsonl").read_text(encoding="utf-8").splitlines()
    by_pair = {(r["name"], r["from"]): r for r in map(json.loads, lines)}
    return Results(by_pair=by_pair, folder=folder, output=done.stderr)


@pytest.mark.parametrize("case", [case for case in CASES if case.on_disk], ids=lambda c: c.name)
def test_trains_as_without_offload(case: Case, results: Results) -> None:
    expected, got = results.of(f"{case.family}-zero3"), results.of(case.name)
    tolerance = 2e-2 if case.precision == "bf16" else 2e-5
    for part, steps in (("before", BEFORE), ("after", AFTER)):
        assert len(got[part]["losses"]) == steps
        assert got[part]["losses"] == pytest.approx(expected[part]["losses"], rel=tolerance)
        assert got[part]["norms"] == pytest.approx(expected[part]["norms"], rel=tolerance)
    assert got["after"]["losses"][-1] < 0.9 * got["before"]["losses"][0]


@pytest.mark.parametrize(
    ("saver", "loader"), PAIRS, ids=[f"{saver.name}-to-{loader.name}" for saver, loader in PAIRS]
)
def test_goes_on_as_the_saver_did(saver: Case, loader: Case, results: Results) -> None:
    expected, got = results.of(saver.name)["after"], results.of(loader.name, saver.name)["after"]
    tolerance = 2e-2 if saver.precision == "bf16" else 2e-5
    assert got["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    if saver == loader:  # nothing is lost on the way, not one bit
        assert got == expected


@pytest.mark.parametrize("case", [case for case in CASES if case.on_disk], ids=lambda c: c.name)
def test_the_ledger_says_what_is_on_the_disk(case: Case, results: Results) -> None:
    result = results.of(case.name)
    mine = result["parameters"] // RANKS
    most, element = 0.95 * mine, 2 if case.precision == "bf16" else 4
    for ledger in result["ledgers"]:
        disk, memory = ledger["disk"], ledger["device"]
        if OPTIMIZER in case.flags:
            assert most * 4 < disk["master_bytes"] < 1.01 * mine * 4
            assert most * 8 < disk["optimizer_bytes"] < 1.01 * mine * 8
            assert memory["master_bytes"] + memory["optimizer_bytes"] < 0.05 * mine * 12
        if PARAM in case.flags:
            assert most * element < disk["params_bytes"] < 1.01 * mine * element
            assert memory["params_bytes"] < 0.1 * mine * element


def test_nothing_is_left_of_the_swap_files(results: Results) -> None:
    assert results.by_pair
    assert list((results.folder / "swap").iterdir()) == []


def test_a_killed_run_leaves_files_that_the_next_one_removes(tmp_path: Path) -> None:
    """The tiny model's states are all below what DeepSpeed swaps: they train in host memory."""
    swap = tmp_path / "swap"
    command = [*("-m", "launcher.train"), *SMALL_FLAGS, "--zero=3", "--precision=bf16"]
    command += [OPTIMIZER, PARAM, f"--nvme-path={swap}", f"--data={write_text(tmp_path / 't.txt')}"]
    command += ["--micro-batch=2", "--report-to=none", "--log-every=1"]
    run = subprocess.Popen(
        [TORCHRUN, "--nproc", str(RANKS), *command, "--steps=100000", f"--out={tmp_path / 'a'}"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert run.stdout is not None
    for line in run.stdout:
        if "step: 2 " in line:
            break
    left = sorted(swap.iterdir())
    assert len(left) == RANKS
    done = python(*command, "--steps=2", f"--out={tmp_path / 'beside'}")
    assert done.returncode == 0, done.stderr
    assert sorted(swap.iterdir()) == left  # in use, so not touched
    run.send_signal(signal.SIGKILL)
    run.communicate()
    (swap / "shardscale-swap-of-somebody").mkdir()
    done = python(*command, "--steps=2", f"--out={tmp_path / 'after'}")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in swap.iterdir()] == ["shardscale-swap-of-somebody"]
