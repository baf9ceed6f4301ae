"""A micro-batch that is recorded and replayed: kernels are counted, none is run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from nullgpu.runs import ROOT, TINY, environment, train

STEPS = """
import ctypes, json, sys
from contextlib import nullcontext
import torch
from launcher.config.arguments import parse_run_config
from launcher.config.resolve import resolve
from launcher.parallel.world import start
from launcher.strategies.engine import train_step
from launcher.train import build_engine

config = parse_run_config([*sys.argv[1:], "--steps", "9"])
resolved = resolve(config, world_size=1, device_type="cuda")
engine = build_engine(resolved, start("cuda", timeout_s=60, needs_group=False))
shape = (resolved.config.data.micro_batch, resolved.seq_len)
inputs = [tuple(torch.ones(shape, dtype=torch.int64, device="cuda") for _ in range(2))]
count = ctypes.CDLL(None).device_launches
count.restype = ctypes.c_size_t
launches = []
for step in range(6):
    before = count()
    times = resolved.accumulation
    train_step(engine, inputs * times, 1e-3, weights=[0.5] * times)
    launches.append(count() - before)
gradients = [p.grad is not None for p in engine._module.parameters()]
print(json.dumps({"launches": launches, "all_have_gradients": all(gradients)}))
"""


def steps(folder: Path, *flags: str) -> dict[str, list[int]]:
    command = [sys.executable, "-c", STEPS, *TINY, *flags]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(folder), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[int]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_micro_batch_is_two_launches_once_it_is_recorded(
    accumulated: int, tmp_path: Path
) -> None:
    flags = ("--global-batch", str(4 * accumulated), "--precision", "bf16")
    eager = steps(tmp_path, *flags, "--cuda-graphs", "off")["launches"]
    found = steps(tmp_path, *flags, "--cuda-graphs", "on")
    assert found["all_have_gradients"]
    assert found["launches"][:3] == eager[:3]
    assert eager[4] == eager[5] > 80 * accumulated
    # Beside the replays: inputs, the factor of the loss, the learning rate, what the step says.
    assert found["launches"][4] == found["launches"][5] <= 5 + 10 * accumulated


def test_without_memory_for_a_recording_the_run_goes_on(tmp_path: Path) -> None:
    run = train(
        tmp_path,
        *("--model", "seed-134m", "--micro-batch", "8", "--precision", "bf16", "--steps", "6"),
        *("--test-batches", "0", "--save-every=0", "--memory-limit", "2500MiB"),
        tiny=False,
    )
    assert run.code == 0, run.output[-4000:]
    assert "no memory is left for CUDA graphs: going on without" in run.output
    assert len(run.records("step")) == 6


def test_auto_records_small_micro_batches_and_says_so(tmp_path: Path) -> None:
    run = train(tmp_path, "--precision", "bf16", "--steps", "6", more={"COLUMNS": "200"})
    assert run.code == 0, run.output[-4000:]
    assert "CUDA graphs: on (auto: " in run.output
    assert run.json("summary.json")["plan"].get("reason") is None
