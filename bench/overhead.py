"""What the launcher costs against bare loops, and what accelerate + transformers costs.

    torchrun --nproc 2 bench/overhead.py [--steps 120] [--cases ddp fsdp zero2 accelerate]

The launcher's side is `launcher.train.train` itself, with records, console, sampler and phases on.
Before each of its steps the other side does one, in the same two processes and on a batch of the
same size, so each pair of neighbouring steps gives one ratio; the median of the ratios is what
counts (absolute rates of a shared machine do not). Everything between two of the launcher's steps
is charged to the launcher.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from bare_loops import Setting, Step, step_function
from peer_loops import PEERS, peer_step

from launcher.data import GlobalBatches
from launcher.parallel.world import World, leave, ranks_from_environment, start
from launcher.run.prepare import Prepared, prepare
from launcher.run.session import Session
from launcher.train import train

WARMUP_STEPS = 10
CASES = {
    "ddp": ("ddp", ["--strategy", "ddp"]),
    "fsdp": ("fsdp", ["--strategy", "fsdp"]),
    "zero2": ("zero2", ["--zero", "2"]),
    "accelerate": ("accelerate", ["--strategy", "ddp"]),
}


class AlternatingSession(Session):
    """A session that lets the other side do a step before each of the launcher's."""

    def __init__(self, prepared: Prepared, world: World, other: Step) -> None:
        super().__init__(prepared, world)
        resolved = prepared.resolved
        self.other = other
        self.ratios: list[float] = []
        self.batches = GlobalBatches(
            prepared.corpus.train,
            seq_len=resolved.seq_len,
            global_batch=resolved.global_batch,
            seed=1,
        )
        self.world = world

    def steps(self) -> Iterator[int]:
        for step in super().steps():
            began = time.perf_counter()
            found = self.batches.rank_slice(step, rank=self.world.rank, world_size=self.world.size)
            sequences = torch.from_numpy(found.tokens)
            self.other(sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous())
            between = time.perf_counter()
            yield step
            ended = time.perf_counter()
            self.ratios.append((between - began) / (ended - between))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
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
            kind, flags = CASES[case]
            argv = [*flags, "--steps", str(options.steps), "--data", str(corpus)]
            argv += ["--device", "cpu", "--out", f"{folder[0]}/{case}"]
            prepared = prepare(argv, world_size=size, ranks_per_node=local_size)
            bare = setting(prepared)
            other = peer_step(PEERS[kind], bare) if kind in PEERS else step_function(kind, bare)
            with AlternatingSession(prepared, world, other) as session:
                train(prepared, world, session)
            results[case] = summarize(session.ratios[WARMUP_STEPS:])
            if world.is_main:
                print(f"RESULT launcher / {case}, tokens/s: {results[case]}", flush=True)
        if world.is_main and options.output:
            options.output.write_text(json.dumps(results, indent=2) + "\n")
        dist.barrier()
    leave(0, together=True)


def setting(prepared: Prepared) -> Setting:
    resolved = prepared.resolved
    return Setting(
        model=resolved.model,
        micro_batch=resolved.config.data.micro_batch,
        bf16=resolved.config.optim.precision == "bf16",
    )


def summarize(ratios: list[float]) -> dict[str, float]:
    ordered = sorted(ratios)
    return {
        "median": round(statistics.median(ordered), 4),
        "lower_quartile": round(ordered[len(ordered) // 4], 4),
        "upper_quartile": round(ordered[3 * len(ordered) // 4], 4),
        "pairs": len(ordered),
    }


if __name__ == "__main__":
    main()
