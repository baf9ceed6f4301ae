"""Programs of other people on two processes: watched, they print, compute and end as they do
alone, and their run folders read as any run's."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import run_ranks

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "watched"
CASES = {
    "trainer": ([], "GPT2LMHeadModel", "DistributedDataParallel"),
    "fsdp_loop": (["fail"], "Sequential", "FSDP2"),
    "deepspeed_loop": ([], "Sequential", "DeepSpeedEngine"),
}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    more = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        words, env={**os.environ, **more}, capture_output=True, text=True, timeout=300
    )


def records(folder: Path, rank: int, kind: str) -> list[dict[str, Any]]:
    lines = (folder / f"rank{rank}.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


@pytest.mark.parametrize("name", CASES)
def test_a_watched_program_is_as_it_is_alone(name: str, tmp_path: Path) -> None:
    flags, model, strategy = CASES[name]
    script = str(PROGRAMS / f"{name}.py")
    words = [str(PROGRAMS / "two_ranks.py"), script]
    asked = (2, "script_rank", script, tmp_path / "alone", *flags)
    alone = run_ranks(asked, DS_ACCELERATOR="cpu")
    assert "loss" in alone.stdout, alone.stderr[-3000:]
    folder = tmp_path / "run"
    program = (sys.executable, *words, str(tmp_path / "watched"), *flags)
    watch = (sys.executable, "-m", "launcher", "watch", "--out", str(folder), "--")
    watched = run(*watch, *program)
    assert watched.returncode == alone.returncode, watched.stderr[-3000:]
    assert losses(watched.stdout) == losses(alone.stdout)
    for rank in (0, 1):
        events = records(folder, rank, "event")
        assert [event["name"] for event in events] == ["program_ended"], events
        (described,) = records(folder, rank, "run")
        assert (described["model"], described["strategy"]) == (model, strategy)
        steps = records(folder, rank, "step")
        assert [step["step"] for step in steps] == [1, 2, 3, 4]
        phases = ("forward_s", "backward_s", "step_s")
        assert all(step[phase] > 0 for step in steps for phase in phases)
        periods = {phase["period"] for phase in records(folder, rank, "phase")}
        assert {"init", "first_step", "steady"} <= periods
        if name == "trainer":
            assert {"evaluation", "save"} <= periods
        held = records(folder, rank, "ledger")[-1]["device"]
        assert held["params_bytes"] > 0
        assert held["optimizer_bytes"] >= held["params_bytes"]
    status = json.loads((folder / "status.json").read_text())
    assert status["exit_code"] == alone.returncode
    assert status["state"] == ("failed" if flags else "completed")


def losses(output: str) -> list[str]:
    found = [line for line in output.splitlines() if line.startswith("loss")]
    assert len(found) == 4, output
    return found
