"""Checkpoints of a gpt2-sized run (124 M parameters) on 2 processes: time, bytes, host memory.

    python bench/saves.py [--model gpt2] [--output bench/results/saves.json]

For each strategy, in one run, alternating: how long a blocking save takes, how long an
asynchronous one holds the loop, what is on the disk afterwards, and by how much saving and
loading raise a rank's resident set above its peak in a training step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

STRATEGIES = {
    "ddp": ["--strategy", "ddp"],
    "fsdp": ["--strategy", "fsdp"],
    "zero2": ["--zero", "2"],
    "zero3": ["--zero", "3"],
}
REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--rank-of", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of is not None:
        measure_on_this_rank(json.loads(options.rank_of))
    if options.output is not None and options.output.exists():
        sys.exit(f"{options.output} exists: nothing is overwritten")
    results = []
    for name, flags in STRATEGIES.items():
        with tempfile.TemporaryDirectory() as folder:
            text = Path(folder) / "corpus.txt"
            text.write_text(Path(argparse.__file__).read_text())
            train = [*flags, "--model", options.model, "--device", "cpu", "--tokenizer", "byte"]
            train += ["--seq-len", "64", "--micro-batch", "1", "--data", str(text)]
            task = json.dumps({"folder": folder, "train": train})
            command = [sys.executable, "-m", "launcher.torchrun", "--nproc", "2"]
            done = subprocess.run([*command, __file__, "--rank-of", task], check=False)
            if done.returncode:
                sys.exit(done.returncode)
            results.append({"strategy": name, **summary(Path(folder))})
        print(json.dumps(results[-1]), flush=True)
    if options.output:
        result = {"model": options.model, "results": results}
        options.output.write_text(json.dumps(result, indent=2) + "\n")


def summary(folder: Path) -> dict[str, Any]:
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    blocking_s = statistics.median(ranks[0]["blocking_s"])
    held_s = statistics.median(ranks[0]["held_s"])
    return {
        "parameters": ranks[0]["parameters"],
        "blocking_save_s": blocking_s,
        "asynchronous_save_holds_s": held_s,
        "ratio": held_s / blocking_s,
        "bytes_per_parameter": ranks[0]["size_bytes"] / ranks[0]["parameters"],
        "largest_tensor_bytes": ranks[0]["largest_tensor_bytes"],
        "above_steady_bytes": {
            what: max(rank[f"{what}_above_bytes"] for rank in ranks) for what in ("save", "load")
        },
    }


def measure_on_this_rank(task: dict[str, Any]) -> None:
    from launcher.checkpoint import Checkpointer
    from launcher.parallel.world import leave, start
    from launcher.run.prepare import prepare
    from launcher.strategies.engine import Engine, train_step
    from launcher.train import build_engine, to_device

    folder = Path(task["folder"])
    world = start("cpu", timeout_s=600, needs_group=True)
    prepared = prepare(task["train"], world_size=world.size, ranks_per_node=world.local_size)
    engine: Engine = build_engine(prepared.resolved, world)

    def step() -> None:
        rows = prepared.corpus.train.sequences(np.array([world.rank]), prepared.resolved.seq_len)
        train_step(engine, to_device(rows, 1, world.device), 1e-4)

    step()
    steady_bytes = peak_during(step)
    blocking = Checkpointer(folder / "blocking", keep=1)
    beside = Checkpointer(folder / "beside", keep=1, asynchronous=True)
    found: dict[str, Any] = {"blocking_s": [], "held_s": []}
    found["save_above_bytes"] = peak_during(lambda: blocking.save(1, engine, {})) - steady_bytes
    found["load_above_bytes"] = (
        peak_during(lambda: blocking.load(folder / "blocking", engine)) - steady_bytes
    )
    beside.save(1, engine, {})  # makes the staging buffer, which is kept
    saved = beside.wait()
    for number in range(2, 2 + REPEATS):
        started = time.perf_counter()
        blocking.save(number, engine, {})
        found["blocking_s"].append(time.perf_counter() - started)
        started = time.perf_counter()
        beside.save(number, engine, {})
        found["held_s"].append(time.perf_counter() - started)
        saved = beside.wait()
    assert saved is not None
    shapes = engine.training_state().shapes
    sizes = [4 * product(shape) for shape in shapes.values()]
    found["parameters"] = sum(sizes) // 4
    found["largest_tensor_bytes"] = max(sizes)
    found["size_bytes"] = sum(file.stat().st_size for file in saved.path.iterdir())
    (folder / f"rank{world.rank}.json").write_text(json.dumps(found))
    leave(0, together=True)


def peak_during(action: Any) -> int:
    """The highest resident set of this process while `action` runs, in bytes (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest one so far
    action()
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
