"""torch's own caching allocator: its limit, what a run does at it, its segments and its history."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nullgpu.runs import GPU, MIB, ROOT, SHORT, command, environment, train

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import resolve
from launcher.forecast.fit import reserved
from launcher.forecast.predict import predict


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
    # a README has fewer sequences than fit
    text = ("--data", str(ROOT / "bench" / "shakespeare.txt"))
    run = train(tmp_path, "--precision", "bf16", "--micro-batch", "auto", *limit, *text)
    assert run.code == 0, run.output[-4000:]
    (record,) = run.records("run")
    assert record["micro_batch"] > 4
    peak = max(step["reserved_peak_bytes"] for step in run.records("step"))
    assert 256 * 2**20 < peak <= 512 * 2**20


def test_beside_a_global_batch_the_plan_chooses(tmp_path: Path) -> None:
    flags = ("--precision", "bf16", "--global-batch", "64", "--context", "64", "--seed", "3")
    run = command(tmp_path, "launcher.train", *SHORT, *flags, "--out", str(tmp_path / "run"))
    assert run.code == 0, run.output[-4000:]
    assert "micro-batch 64 of 64 sequences per rank: the largest planned to fit" in run.output
    (record,) = run.records("run")
    assert record["micro_batch"] == record["global_batch"] == 64


def segments(path: Path) -> list[dict[str, Any]]:
    with path.open("rb") as file:
        found: list[dict[str, Any]] = pickle.load(file)["segments"]
    return found


def test_segments_are_expandable(tmp_path: Path) -> None:
    run = train(tmp_path, "--memory-trace")
    assert run.code == 0, run.output[-4000:]
    found = segments(run.folder / "memory_snapshot_rank0.pickle")
    assert {segment["is_expandable"] for segment in found} == {True}


def test_the_users_own_variable_wins(tmp_path: Path) -> None:
    own = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    run = train(tmp_path, "--memory-trace", more=own)
    assert run.code == 0, run.output[-4000:]
    found = segments(run.folder / "memory_snapshot_rank0.pickle")
    assert {segment["is_expandable"] for segment in found} == {False}


ADDED_IN = {"fp32": (), "bf16": ("--grad-accum-dtype", "bf16")}


@pytest.mark.parametrize("type_", ADDED_IN)
def test_a_fraction_of_the_optimizer_is_in_host_memory(type_: str, tmp_path: Path) -> None:
    flags = (
        *("--zero", "3", "--precision", "bf16", "--layers", "6", "--no-pin-memory"),
        *("--global-batch", "8", "--offload-optimizer", "cpu", "--offload-fraction", "0.5"),
    )
    more = {"SHARDSCALE_NULL_GPU_CHECKS": "false"}  # no step has overflowed
    run = train(tmp_path, *flags, *ADDED_IN[type_], more=more)
    assert run.code == 0, run.output[-4000:]
    (held,) = (record for record in run.records("ledger") if record["moment"] == "held")
    (predicted,) = (record for record in run.records("ledger") if record["moment"] == "predicted")
    device, host = held["device"], held["host"]
    all_bytes = 2 * device["params_bytes"]  # in fp32 what is bf16 there
    assert device["master_bytes"] + host["master_bytes"] == all_bytes
    # Whole parameters, of which the smallest of those that are moved is 1% of the model.
    assert 0.49 * all_bytes < device["master_bytes"] <= 0.5 * all_bytes
    for place in (device, host):
        # Counters are a number for each piece.
        assert place["optimizer_bytes"] == pytest.approx(2 * place["master_bytes"], abs=64 * 4)
    # What the optimizer reads is where gradients are added up, unless that is of another type; in
    # host memory these are always two.
    apart = 0 if type_ == "fp32" else 0.5
    assert device["grads_bytes"] == (1 + apart) * device["master_bytes"]
    assert host["grads_bytes"] == (2 if type_ == "fp32" else 1.5) * host["master_bytes"]
    names = ("params", "master", "grads", "optimizer", "buffers")
    plan = run.json("summary.json")["plan"]
    for name in names:
        assert plan["measured"][name] == plan["predicted"][name] == device[f"{name}_bytes"]
    assert predicted["host"]["used_bytes"] == sum(host[f"{name}_bytes"] for name in names)


def test_gradients_that_are_held_against_infinity_have_a_stream_of_their_own(
    tmp_path: Path,
) -> None:
    wide = ("--layers", "2", "--d-model", "1024", "--heads", "8")
    flags = ("--zero", "3", "--precision", "fp16", *wide)
    more = {"SHARDSCALE_NULL_GPU_CHECKS": "false"}  # no step has overflowed
    run = train(tmp_path, *flags, "--test-batches", "0", more=more)
    assert run.code == 0, run.output[-4000:]
    peak = max(step["reserved_peak_bytes"] for step in run.records("step"))
    config = ("--config", str(run.folder / "config.yaml"))
    resolved = resolve(parse_run_config(config), world_size=1, device_type="cuda")
    planned = reserved(predict(resolved, gpu=GPU), resolved, limit_bytes=None)
    assert planned.peak_reserved_bytes == pytest.approx(peak, abs=2 * MIB)


def test_stage_3_keeps_nothing_of_an_evaluation(tmp_path: Path) -> None:
    wide = ("--model", "gpt2-xl", "--layers", "3", "--tied", "False", "--eval-every", "2")
    recomputed = ("--activation-checkpointing", "full", "--micro-batch", "4", "--seq-len", "256")
    flags = ("--zero", "3", "--precision", "bf16", *wide, *recomputed, "--save-every", "0")
    alone = {"SHARDSCALE_NULL_GPU_ALONE": "1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "7"}
    alone |= {"LOCAL_WORLD_SIZE": "7", "MASTER_ADDR": "localhost", "MASTER_PORT": "29531"}
    alone |= {"SHARDSCALE_NULL_GPU_CHECKS": "false"}  # no step has overflowed
    run = train(tmp_path, *flags, tiny=False, more=alone, gpus=7)
    assert run.code == 0, run.output[-4000:]
    steady = run.json("summary.json")["plan"]["periods"]["steady"]
    assert steady["measured"] == pytest.approx(steady["predicted"], rel=0.005)


BETWEEN_SAMPLES = """
import os
import torch
from launcher.measure.memory import memory_meter
meter = memory_meter(torch.device("cuda", 0), trace=False)
meter.period("steady")
meter.begin_step(11)  # of which phases are not sampled
with meter.phase("forward"):
    torch.empty(2**28, dtype=torch.uint8, device="cuda")
meter.end_step(11)
meter.begin_step(13)
meter.end_step(13)
assert 2**28 <= meter.peak_bytes() < 2**29, meter.peak_bytes()
with meter.apart("save", "checkpoint"):
    torch.empty(2**29, dtype=torch.uint8, device="cuda")
assert meter.peaks["save", "checkpoint"] >= 2**29
os._exit(0)
"""


def test_the_peak_of_a_run_is_that_of_every_step_and_save(tmp_path: Path) -> None:
    words = [sys.executable, "-c", BETWEEN_SAMPLES]
    done = subprocess.run(words, env=environment(tmp_path), cwd=ROOT, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()


def test_evaluations_have_a_peak_of_their_own(tmp_path: Path) -> None:
    # Blocks are recomputed in training; an evaluation holds the logits of all tokens.
    small = ("--activation-checkpointing", "full", "--micro-batch", "64", "--eval-every", "2")
    run = train(tmp_path, "--precision", "bf16", *small)
    assert run.code == 0, run.output[-4000:]
    (peak,) = [r["peak_bytes"] for r in run.records("phase") if r["period"] == "evaluation"]
    highest = max(step["allocated_peak_bytes"] for step in run.records("step"))
    assert peak > 0
    assert run.json("summary.json")["ranks"][0]["peak_bytes"] == max(peak, highest)
