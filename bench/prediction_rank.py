"""One rank of bench/prediction.py: runs cases one after the other and compares.

    torchrun --nproc N prediction_rank.py RESULTS cpu|cuda WORLD_SIZE CASE...

Rank 0 appends a JSON line per case to RESULTS.
"""

import gc
import json
import os
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from prediction_cases import Case, cases_for
from torch.nn import functional, parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import Resolved, resolve
from launcher.data import Sequences
from launcher.forecast.allocator import replay
from launcher.forecast.budget import within_budget
from launcher.forecast.predict import Prediction, predict
from launcher.measure.hardware import find_gpu
from launcher.measure.memory import TracedMemory, memory_meter
from launcher.optim.choice import learning_rate
from launcher.parallel.mesh import Mesh
from launcher.parallel.world import World, expand_segments, leave, start
from launcher.strategies.engine import train_step
from launcher.train import build_engine, to_device

STEPS = 3
LINEAR = functional.linear


def main() -> None:
    results, device, ranks, *names = sys.argv[1:]
    world_size = int(ranks)
    world = join(device, world_size)
    known = {case.name: case for case in cases_for(world_size, device)}
    with Path(results).open("a", encoding="utf-8") as file:
        for name in names:
            case = known[name]
            row = {"name": name, "world_size": world_size, "family": case.family}
            try:
                row["ranks"] = gathered(compare(case, world), world)
            except Exception:
                # The same mistake on every rank; the next case can still run.
                row["error"] = traceback.format_exc()
            if world.is_main:
                file.write(json.dumps(row) + "\n")
                file.flush()
    leave(0, together=device == "cpu")


def join(device: str, world_size: int, *, expandable_segments: bool = True) -> World:
    """A real process group on CPUs; on a GPU, rank 0 of one that is pretended."""
    if device == "cpu":
        return start("cpu", timeout_s=300, needs_group=True)
    sizes = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    os.environ.update(sizes, RANK="0", LOCAL_RANK="0")  # DeepSpeed asks the environment
    if expandable_segments:
        expand_segments()
    torch.cuda.set_device(0)
    # Asks all ranks, of which there are none.
    vars(parallel.distributed)["_verify_param_shape_across_processes"] = lambda *_, **__: True
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    return World(
        rank=0,
        local_rank=0,
        size=world_size,
        local_size=world_size,
        device=torch.device("cuda", 0),
    )


def gathered(mine: dict[str, Any], world: World) -> list[dict[str, Any]]:
    """Return what every rank found; on a GPU there is only this one."""
    if world.device.type == "cuda":
        return [mine]
    ranks: list[Any] = [None] * world.size
    dist.all_gather_object(ranks, mine)
    return ranks


def compare(case: Case, world: World) -> dict[str, Any]:
    """Peaks of this rank, measured and predicted."""
    config = parse_run_config(list(case.flags))
    resolved = resolve(config, world_size=world.size, device_type=world.device.type)
    resolved = within_budget(resolved)
    measured = measure(resolved, world)
    predicted = predict(
        resolved,
        rank=world.rank,
        gpu=find_gpu(gpu_name(world)),
    )
    phases = {f"{period}/{phase}": size for (period, phase), size in predicted.peaks.items()}
    found = {
        "rank": world.rank,
        "measured_bytes": highest(measured["phases"]),
        "predicted_bytes": highest(phases),
        "measured_phases": measured["phases"],
        "predicted_phases": phases,
        "measured_held_bytes": measured["held_bytes"],
        "predicted_held_bytes": predicted.held.device.states_bytes,
    }
    if world.device.type == "cuda":
        found |= on_gpu(measured, predicted, resolved.expandable_segments)
    return found


def gpu_name(world: World) -> str | None:
    """Return the GPU's name as CUDA has it; None on a CPU."""
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None


def highest(phases: dict[str, int]) -> int:
    """The peak of training; building has phases of its own, which are compared apart."""
    return max(size for name, size in phases.items() if not name.startswith("init"))


def on_gpu(
    measured: dict[str, Any], predicted: Prediction, expandable_segments: bool
) -> dict[str, int]:
    """Return what the allocator reserves, too, and the predicted peak of what it hands out."""
    use = replay(predicted.events, predicted.streams, expandable_segments=expandable_segments)
    return {
        "measured_reserved_bytes": measured["reserved_bytes"],
        "predicted_reserved_bytes": use.peak_reserved_bytes,
        "predicted_rounded_bytes": use.peak_allocated_bytes,
    }


def measure(resolved: Resolved, world: World) -> dict[str, Any]:
    """A few real steps, with the meter that `launcher.train` has."""
    memory = memory_meter(world.device, trace=True)
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    tracing = memory.trace if isinstance(memory, TracedMemory) else nullcontext()
    before = torch.cuda.memory_allocated() if world.device.type == "cuda" else 0
    with tracing:
        complete_reductions(world)
        with memory.phase("build"):
            engine = build_engine(resolved, world)
        memory.watch(engine)
        train(engine, memory, resolved, world)
        held = engine.count_states().ledger(world.device)
    reserved = torch.cuda.max_memory_reserved() if world.device.type == "cuda" else 0
    phases = {f"{period}/{phase}": size - before for (period, phase), size in memory.peaks.items()}
    release(engine)
    del engine, memory
    gc.collect()
    return {
        "phases": phases,
        "held_bytes": held.device.states_bytes,
        "reserved_bytes": reserved,
    }


def train(engine: Any, memory: Any, resolved: Resolved, world: World) -> None:
    """The loop of launcher/train.py on made-up tokens."""
    generator = np.random.default_rng(world.rank)
    for step in range(1, STEPS + 1):
        memory.period("first_step" if step == 1 else "steady")
        memory.begin_step(step)
        with memory.phase("data"):
            micro_batches = made_up(resolved, world, generator)
        lr = learning_rate(step, resolved.config.optim, STEPS)
        train_step(engine, micro_batches, lr, phase=memory.phase)
        memory.end_step(step)


def made_up(
    resolved: Resolved, world: World, generator: np.random.Generator
) -> list[tuple[torch.Tensor, ...]]:
    """Bytes that nobody wrote, as this rank's micro-batches of a step."""
    data = resolved.config.data
    mesh = Mesh.at(world.rank, world.size, resolved.config.sharding)
    positions = mesh.positions(resolved.seq_len)
    rows = resolved.accumulation * data.micro_batch
    tokens = generator.integers(0, 256, (rows, resolved.seq_len + 1), dtype=np.int64)
    return to_device(Sequences(tokens), data.micro_batch, world.device, positions)


def complete_reductions(world: World) -> None:
    """A pretended group never finishes DDP's reductions: say at once that they are done."""
    if world.device.type == "cpu":
        return

    # torch reads the annotations.
    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    kind: Any = parallel.DistributedDataParallel
    kind._register_builtin_comm_hook = lambda module, _: module.register_comm_hook(None, hook)


def release(engine: Any) -> None:
    """Drop DeepSpeed's hooks and buffers, which hold the model in cycles, and take back its own
    linear function, which the next case's run would not have: it keeps inputs of frozen weights."""
    vars(functional)["linear"] = LINEAR
    inner = getattr(engine, "_engine", None)
    if inner is not None:
        inner.destroy()
        from deepspeed.utils import groups

        groups.mpu = None  # which the next engine would ask, if it has none of its own


if __name__ == "__main__":
    main()
