"""The kernel of LowPrecisionAdamW: what it computes, in Triton's interpreter; what it launches."""

import json
from pathlib import Path
from typing import Any

import pytest
from nullgpu.runs import command, interpreted, train
from optim_kernel_cases import CASES, assert_rounded_alike

from launcher.model.sizes import named
from launcher.strategies.parameters import parameters_of


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, int], Any]:
    lines = interpreted("tests/optim_kernel_cases.py")
    return {(line["case"], line["elements"]): line["found"] for line in lines}


@pytest.mark.parametrize(("name", "elements"), CASES)
def test_an_update_is_torchs_own(
    name: str, elements: int, results: dict[tuple[str, int], Any]
) -> None:
    assert_rounded_alike(results[name, elements])


def test_an_update_is_a_kernel_per_tensor_and_never_waits(tmp_path: Path) -> None:
    path = tmp_path / "launches.json"
    run = command(tmp_path, "bench.update_launches", "--size", "nano", "--output", str(path))
    assert run.code == 0, run.output[-4000:]
    updates = json.loads(path.read_text())["updates"]
    tensors = len(parameters_of(named("nano")))
    assert len(updates) == 5
    for name, update in updates.items():
        # The counters take another two.
        assert update["fused"]["launches"] <= tensors + 2, name
        assert update["fused"]["temporary_bytes"] <= 512, name
    assert updates["bf16-pure"]["operators"]["launches"] > 10 * tensors


@pytest.mark.parametrize(
    "flags",
    [
        ("--strategy", "single", "--precision", "bf16-pure", "--optimizer", "adamw8bit"),
        ("--strategy", "fsdp", "--precision", "bf16-pure", "--betas", "0.9", "0.99"),
        ("--strategy", "single", "--precision", "bf16-pure", "--no-compensation"),
        ("--strategy", "fsdp", "--optimizer", "apollo", "--apollo-rank", "8"),
        ("--strategy", "fsdp", "--optimizer-in-backward", "--optimizer", "adamw8bit"),
        ("--zero", "0", "--precision", "bf16", "--optimizer", "adamw8bit"),
    ],
    ids=" ".join,
)
def test_a_run_keeps_the_states_that_were_predicted(flags: tuple[str, ...], tmp_path: Path) -> None:
    run = train(tmp_path, *flags, "--clip", "0")
    assert run.code == 0, run.output[-4000:]
    plan = run.json("summary.json")["plan"]
    assert plan["measured"]["optimizer"] == plan["predicted"]["optimizer"] > 0
