"""torch's own caching allocator: its limit, what a run does at it, its segments and its history."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from nullgpu.runs import train


def test_out_of_memory_ends_with_advice(tmp_path: Path) -> None:
    limit = ("--memory-limit", "160MiB", "--micro-batch", "256")
    run = train(tmp_path, "--precision", "bf16", *limit)
    assert run.code == 3, run.output[-4000:]
    assert "out of memory on rank 0 in forward of step 1: tried to allocate 20.0MiB" in run.output
    assert "would fit: --micro-batch" in run.output
    status = run.json("status.json")
    assert (status["state"], status["exit_code"]) == ("oom", 3)


def test_a_micro_batch_is_found(tmp_path: Path) -> None:
    limit = ("--memory-limit", "512MiB", "--steps", "2")
    run = train(tmp_path, "--precision", "bf16", "--micro-batch", "auto", *limit)
    assert run.code == 0, run.output[-4000:]
    (record,) = run.records("run")
    assert record["micro_batch"] > 4
    peak = max(step["reserved_peak_bytes"] for step in run.records("step"))
    assert 256 * 2**20 < peak <= 512 * 2**20


def segments(path: Path) -> list[dict[str, Any]]:
    with path.open("rb") as file:
        found: list[dict[str, Any]] = pickle.load(file)["segments"]
    return found


@pytest.mark.parametrize("expandable", [True, False])
def test_segments_are_expandable_unless_a_run_does_not_want_them(
    expandable: bool, tmp_path: Path
) -> None:
    flags = () if expandable else ("--no-expandable-segments",)
    run = train(tmp_path, "--memory-snapshot", *flags)
    assert run.code == 0, run.output[-4000:]
    found = segments(run.folder / "memory_snapshot_rank0.pickle")
    assert {segment["is_expandable"] for segment in found} == {expandable}


def test_the_users_own_variable_wins(tmp_path: Path) -> None:
    own = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    run = train(tmp_path, "--memory-snapshot", more=own)
    assert run.code == 0, run.output[-4000:]
    found = segments(run.folder / "memory_snapshot_rank0.pickle")
    assert {segment["is_expandable"] for segment in found} == {False}
