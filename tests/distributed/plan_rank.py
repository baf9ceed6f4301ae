"""Rank 0 of process groups that are only pretended, with real tensors.

    python plan_rank.py WORLD_SIZE,CASE,... ...

Prints a JSON line per size and case: peaks and held states, measured and predicted.
"""

import gc
import json
import os
import sys
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from harness import MODEL_FLAGS
from plan_cases import CASES
from rank_loop import release
from torch.testing._internal.distributed.fake_pg import FakeStore

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import resolve
from launcher.forecast.predict import predict
from launcher.measure.memory import TracedMemory
from launcher.parallel.world import World
from launcher.strategies.engine import train_step
from launcher.strategies.zero.engine import import_deepspeed
from launcher.train import build_engine

MICRO_BATCH, ACCUMULATION = 4, 2


def main() -> None:
    import_deepspeed(torch.device("cpu"))
    for asked in sys.argv[1:]:  # a fork each: DeepSpeed remembers the size of its first group
        child = os.fork()
        if child == 0:
            size, *names = asked.split(",")
            pretend(size, names)
            sys.exit()
        if os.waitpid(child, 0)[1]:
            sys.exit(f"failed: {asked}")


def pretend(size: str, names: list[str]) -> None:
    """Compare cases on the first rank of a group that is not there."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # nobody listens
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=int(size))
    complete_reductions()
    for name in names:
        found = {"size": int(size), "name": name, **compare(CASES[name], int(size))}
        print(json.dumps(found), flush=True)


def compare(flags: tuple[str, ...], world_size: int) -> dict[str, Any]:
    arguments = [*MODEL_FLAGS, *flags, f"--micro-batch={MICRO_BATCH}"]
    data_ranks = parse_run_config(arguments).sharding.data_ranks(world_size)
    arguments.append(f"--global-batch={MICRO_BATCH * ACCUMULATION * data_ranks}")
    resolved = resolve(parse_run_config(arguments), world_size=world_size, device_type="cpu")
    world = World(
        rank=0, local_rank=0, size=world_size, local_size=world_size, device=torch.device("cpu")
    )
    memory = TracedMemory(world.device)
    with memory.trace:
        engine: Any = build_engine(resolved, world)
        memory.watch(engine)
        for step in (1, 2):
            memory.period("first_step" if step == 1 else "steady")
            memory.begin_step(step)
            run_step(engine, memory, resolved.local_seq_len)
            memory.end_step(step)  # also has the tracker see what was born inside DTensors
        held = asdict(engine.count_states().ledger(world.device).device)
    peaks = memory.peaks
    release(engine)
    gc.collect()
    prediction = predict(resolved, rank=0)
    trained = [size for (period, _), size in prediction.peaks.items() if period != "init"]
    return {
        "parameters": resolved.model.parameter_count,
        "measured_bytes": max(peaks.values()),
        "predicted_bytes": max(trained),
        "measured_step_bytes": peaks["steady", "step"],
        "predicted_step_bytes": prediction.peaks["steady", "step"],
        "measured_held": held,
        "predicted_held": asdict(prediction.held.device),
    }


def run_step(engine: Any, memory: TracedMemory, seq_len: int) -> None:
    shape = (MICRO_BATCH, seq_len)
    batch = [
        (torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64))
        for _ in range(ACCUMULATION)
    ]
    train_step(engine, batch, 1e-3, phase=memory.phase)


def complete_reductions() -> None:
    """The pretended group never ends DDP's reductions: say at once that they are done."""

    def register(module: Any, _: Any) -> None:
        module.register_comm_hook(None, _done)

    kind: Any = torch.nn.parallel.DistributedDataParallel
    kind._register_builtin_comm_hook = register


# torch reads the annotations.
def _done(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


if __name__ == "__main__":
    main()
