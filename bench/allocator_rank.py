"""One process of bench/allocator.py: builds and trains each case as rank 0, and compares.

    python allocator_rank.py RESULTS CASE...

Appends a JSON line per case to RESULTS.
"""

import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from allocator_cases import Case, cases, edge_cases
from prediction_rank import complete_reductions, join, train

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import Resolved, resolve
from launcher.forecast.allocator import replay
from launcher.forecast.fit import Room, needed_bytes, verdict
from launcher.forecast.predict import predict
from launcher.measure.hardware import find_gpu
from launcher.measure.limit import is_out_of_memory, limit_memory
from launcher.measure.memory import memory_meter
from launcher.parallel.world import World, start
from launcher.strategies import engine as engines
from launcher.train import build_engine
from launcher.util.sizes import parse_bytes

NOWHERE = 2**50
MOST_S = 300
HEAVY = ("torch._dynamo", "torch.distributed.fsdp", "deepspeed")  # most cases need them
Phases = dict[str, int]


def main() -> None:
    results, *names = sys.argv[1:]
    for module in HEAVY:
        importlib.import_module(module)
    # Nobody looks at values, and drawing those of a large model takes seconds.
    vars(engines)["initial_value"] = without_values
    edge = [int(name.split("-")[1]) for name in names if name.startswith("edge-")]
    # Drawn in one row, so that the last says how many there are.
    drawn = edge_cases(max(edge, default=-1) + 1, seed=0)
    known = {case.name: case for case in (*cases(), *drawn)}
    for name in names:
        # Everything is imported by now and no thread has begun: a process of its own costs little,
        # and nothing of a case is left in the next one's allocator.
        child = os.fork()
        if child == 0:
            # What one case has compiled and tuned, the next one tunes, too.
            os.environ["TORCHINDUCTOR_CACHE_DIR"] += f"/{name}"
            signal.alarm(MOST_S)
            with Path(results).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row_of(known[name])) + "\n")
            os._exit(0)
        os.waitpid(child, 0)


def row_of(case: Case) -> dict[str, Any]:
    """Return the row of a case: what it has come to, or the traceback of what it raised."""
    started_s = time.monotonic()
    row = {"name": case.name, "family": case.family, "world_size": case.ranks}
    try:
        row |= compare(case, joined(case))
    except Exception:
        row["error"] = traceback.format_exc()
    return {**row, "took_s": round(time.monotonic() - started_s, 2)}


def joined(case: Case) -> World:
    """The only rank of a real group, or rank 0 of one that is pretended."""
    if not case.expandable:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:False"
    if case.ranks == 1:
        return start("cuda", timeout_s=60, needs_group=True, expandable_segments=case.expandable)
    return join("cuda", case.ranks, expandable_segments=case.expandable)


def without_values(name: str, shape: torch.Size, *_: Any, device: torch.device, **__: Any) -> Any:
    return torch.zeros(shape, device=device)


def compare(case: Case, world: World) -> dict[str, Any]:
    """Return what was predicted for a case, and what torch's allocator says."""
    config = parse_run_config(list(case.flags))
    resolved = resolve(config, world_size=world.size, device_type="cuda")
    gpu = torch.cuda.get_device_name()
    if case.limit_share is not None:
        anywhere = Room(size_bytes=NOWHERE, gpu=gpu, capped=True)
        needed = needed_bytes(resolved, anywhere)
        config = config.replace(memory_limit=str(int(case.limit_share * needed)))
        resolved = resolve(config, world_size=world.size, device_type="cuda")
    limit = config.measure.memory_limit
    limit_bytes = NOWHERE if limit is None else parse_bytes(limit, "--memory-limit")
    measured = measure(resolved, world)
    prediction = predict(
        resolved,
        rank=world.rank,
        gpu=find_gpu(gpu),
    )
    use = replay(
        prediction.events,
        prediction.streams,
        limit_bytes=limit_bytes,
        expandable_segments=resolved.expandable_segments,
    )
    room = Room(size_bytes=limit_bytes, gpu=gpu, capped=True)
    needed = needed_bytes(resolved, room)
    return {
        **measured,
        **({} if case.limit_share is None else {"limit_share": case.limit_share}),
        "torch": torch.__version__,
        "predicted_allocated_bytes": use.peak_allocated_bytes,
        "predicted_reserved_bytes": use.peak_reserved_bytes,
        "predicted_phases": {"/".join(key): size for key, size in prediction.peaks.items()},
        "predicted_held_bytes": prediction.held.device.states_bytes,
        "needed_bytes": needed,
        "limit_bytes": limit_bytes,
        "verdict": verdict(needed, limit_bytes),
    }


def never_overflow(engine: Any) -> None:
    """DeepSpeed asks the device whether to skip a step, and this one's answers mean nothing."""
    optimizer: Any = getattr(getattr(engine, "_engine", None), "optimizer", None)
    names = vars(sys.modules[type(optimizer).__module__])
    if "is_invalid_grad_norm" in names:
        names["is_invalid_grad_norm"] = lambda norm: False
    asks = getattr(optimizer, "has_overflow", None)
    if asks is not None:
        optimizer.has_overflow = lambda *which, **how: asks(*which, **how) and False


def measure(resolved: Resolved, world: World) -> dict[str, Any]:
    """A few real steps, as `launcher.train` takes them, within the case's limit."""
    limit = resolved.config.measure.memory_limit
    if limit is not None:
        limit_memory(limit, world.device)
    reserved = reserved_peaks()
    memory = memory_meter(world.device, trace=False)
    engine: Any = None
    ran_out = False
    try:
        complete_reductions(world)
        with memory.phase("build"):
            engine = build_engine(resolved, world)
        never_overflow(engine)
        memory.watch(engine)
        train(engine, memory, resolved, world)
        held = engine.count_states().ledger(world.device).device.states_bytes
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        ran_out, held = True, 0
    peaks = {"/".join(key): size for key, size in memory.peaks.items()}
    torch.cuda.reset_peak_memory_stats()
    return {
        "measured_allocated_bytes": max(peaks.values(), default=0),
        "measured_reserved_bytes": max(reserved),
        "measured_phases": peaks,
        "measured_held_bytes": held,
        "ran_out": ran_out,
    }


def reserved_peaks() -> list[int]:
    """Bytes, growing: the highest that was reserved between two resets of torch's peaks, which the
    meter does at each phase and DeepSpeed as it is built; what was reserved may shrink in between.
    """
    peaks: list[int] = []
    torch.cuda.reset_peak_memory_stats()
    reset = torch.cuda.reset_peak_memory_stats

    def noted(*device: Any) -> None:
        peaks.append(torch.cuda.max_memory_reserved())
        reset(*device)

    vars(torch.cuda)["reset_peak_memory_stats"] = noted
    return peaks


if __name__ == "__main__":
    main()
