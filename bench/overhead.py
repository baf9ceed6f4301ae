"""What the launcher costs against bare loops, and what accelerate + transformers costs.

    torchrun --nproc 2 bench/overhead.py [--pairs 12] [--steps 14] [--output results/overhead.json]

Both sides alternate in one run, in the same two processes, on the same batches; each pair gives
one ratio of median step times, and the median of the pairs is what counts (these ratios stand,
absolute rates of a shared machine do not). The launcher's side is `launcher.train.train` itself,
with records, console and phases on.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
from pathlib import Path

import torch.distributed as dist
from bare_loops import Setting, run, step_function

from launcher.data import GlobalBatches
from launcher.measure.session import Session
from launcher.preflight import Prepared, prepare
from launcher.train import train
from launcher.world import World, leave, ranks_from_environment, start

WARMUP_STEPS = 4
CASES = {
    "ddp": ("ddp", ["--strategy", "ddp"]),
    "fsdp": ("fsdp", ["--strategy", "fsdp"]),
    "zero2": ("zero2", ["--zero", "2"]),
    "accelerate": ("accelerate", ["--strategy", "ddp"]),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    size, local_size = ranks_from_environment()
    world = start("cpu", timeout_s=600, needs_group=True)
    results = {}
    with tempfile.TemporaryDirectory() as shared:
        folder = [shared]
        dist.broadcast_object_list(folder, src=0)
        corpus = Path(folder[0]) / "corpus.txt"
        if world.is_main:
            corpus.write_text(Path(argparse.__file__).read_text() * 2)
        dist.barrier()
        for case in options.cases:
            bare, flags = CASES[case]
            argv = [*flags, "--steps", str(options.steps), "--data", str(corpus)]
            argv += ["--log-every", "1", "--device", "cpu", "--tokenizer", "byte"]
            prepared = prepare(argv, world_size=size, ranks_per_node=local_size)
            ratios = [
                one_pair(prepared, world, bare, Path(folder[0]) / f"{case}-{index}", index)
                for index in range(options.pairs)
            ]
            results[case] = summarize(ratios)
            if world.is_main:
                print(f"RESULT {case}: launcher / bare tokens/s = {results[case]}", flush=True)
        if world.is_main and options.output:
            options.output.write_text(json.dumps(results, indent=2) + "\n")
        dist.barrier()
    leave(0, together=True)


def one_pair(prepared: Prepared, world: World, bare: str, out: Path, index: int) -> float:
    """Launcher's rate over the bare loop's; which goes first alternates."""
    times = {}
    for side in ("launcher", "bare") if index % 2 else ("bare", "launcher"):
        if side == "launcher":
            times[side] = launcher_steps(prepared, world, out)
        else:
            times[side] = bare_steps(prepared, world, bare)
    medians = {side: statistics.median(steps[WARMUP_STEPS:]) for side, steps in times.items()}
    return medians["bare"] / medians["launcher"]


def launcher_steps(prepared: Prepared, world: World, out: Path) -> list[float]:
    resolved = prepared.resolved
    config = resolved.config.replace(out=out)
    resolved = dataclasses.replace(resolved, config=config)
    prepared = dataclasses.replace(prepared, resolved=resolved)
    with Session(prepared, world) as session:
        train(prepared, world, session)
        return [times.duration_s for times in session.journal.phase_times]


def bare_steps(prepared: Prepared, world: World, kind: str) -> list[float]:
    resolved, data = prepared.resolved, prepared.resolved.config.data
    assert data.seq_len
    assert data.global_batch
    setting = Setting(
        model=resolved.model,
        micro_batch=data.micro_batch,
        seq_len=data.seq_len,
        rank=world.rank,
        world_size=world.size,
        bf16=resolved.config.optim.precision == "bf16",
    )
    batches = GlobalBatches(
        prepared.corpus.train, seq_len=data.seq_len, global_batch=data.global_batch, seed=0
    )
    assert resolved.config.loop.steps
    return run(step_function(kind, setting), batches, setting, steps=resolved.config.loop.steps)


def summarize(ratios: list[float]) -> dict[str, float]:
    ordered = sorted(ratios)
    return {
        "median": round(statistics.median(ordered), 4),
        "min": round(ordered[0], 4),
        "max": round(ordered[-1], 4),
        "pairs": len(ordered),
    }


if __name__ == "__main__":
    main()
