"""A stop signal ends a rank wherever it comes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.run.ending import _reason
from launcher.util.errors import ExitCode

STOPPED_IN_A_DESTRUCTOR = """
import os, signal, time
import torch
from launcher.parallel.world import World
from launcher.run.ending import ending

class Held:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)  # Python handles the signal here, and must ignore what the handler raises

world = World(rank=0, local_rank=0, size=1, local_size=1, device=torch.device("cpu"))
with ending(world):
    held = Held()
    del held
    time.sleep(60)
"""


def test_a_signal_inside_a_destructor_is_not_lost() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STOPPED_IN_A_DESTRUCTOR],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "RANK"},
        timeout=50,
    )
    assert done.returncode == ExitCode.PREEMPTED, done.stderr
    name = signal.SIGTERM.name
    assert done.stderr == (
        f"shardscale: stopped by {name} before its first step: there was nothing to save\n"
    )


def test_a_reason_is_the_line_that_names_the_error() -> None:
    asynchronous = RuntimeError("CUDA error: unspecified launch failure\nCompile with `DSA` to ...")
    assert _reason(asynchronous) == "RuntimeError: CUDA error: unspecified launch failure"
    with pytest.raises(SyntaxError) as raised:
        compile("a = = 1", "decoder.py", "exec")
    assert _reason(raised.value) == "SyntaxError: invalid syntax"
    noted = ValueError("of a shape")
    noted.add_note("in the backward of a block")
    assert _reason(noted) == "ValueError: of a shape"


STOPPED_IN_A_CALL = """
import os, signal, sys
from launcher.run.saves import Saves
from launcher.train import main

name, calls, *flags = sys.argv[1:]
whole, left = getattr(Saves, name), [int(calls)]

def stopped(*arguments):
    left[0] -= 1
    if left == [0]:
        os.kill(os.getpid(), signal.SIGTERM)
    return whole(*arguments)

setattr(Saves, name, stopped)
main(flags)
"""
SMALL = ["--device=cpu", "--tokenizer=byte", "--vocab-size=257", "--layers=1", "--d-model=16"]
SMALL += ["--heads=1", "--context=16", "--micro-batch=2", "--report-to=none", "--steps=9"]


@pytest.mark.parametrize(
    ("name", "calls", "when", "evaluated"),
    [("resume", 1, "before its first step", []), ("after_step", 2, "after step 2", [1, 2])],
)
def test_a_stopped_run_says_when_and_evaluates_a_step_once(
    name: str, calls: int, when: str, evaluated: list[int], tmp_path: Path
) -> None:
    """Also where it is stopped while it saves, behind the step's evaluation."""
    (tmp_path / "text.txt").write_text("A text to train on. " * 500)
    flags = [*SMALL, "--data=text.txt", "--out=run", "--save-every=1", "--eval-every=1"]
    done = subprocess.run(
        [sys.executable, "-c", STOPPED_IN_A_CALL, name, str(calls), *flags, "--log-every=1000"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"SHARDSCALE_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
        timeout=100,
    )
    assert done.returncode == ExitCode.PREEMPTED, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last == f"preempted {when}: resume with the same command and --out run --resume auto"
    records = map(json.loads, (tmp_path / "run" / "rank0.jsonl").read_text().splitlines())
    assert [one["step"] for one in records if one["kind"] == "eval"] == evaluated
