"""One rank of `bench/dimensions.py --tensor`: all layouts one after the other, on made-up tokens.

    torchrun --nproc N dimensions_rank.py RESULTS bytes|speed LAYOUTS

LAYOUTS is JSON, name -> flags; of DeepSpeed's those without a cut come first, since a process of it
that has known ranks of a matrix wants them for ever. Rank 0 writes what was measured to RESULTS,
name -> figures.
"""

import contextlib
import gc
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prediction_rank import gathered, join, made_up, release

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import Resolved, resolve
from launcher.forecast.collectives import sent_bytes
from launcher.forecast.predict import predict
from launcher.forecast.traffic import Collective
from launcher.measure.memory import LEDGER_STEPS, MemoryMeter, TracedMemory
from launcher.optim.choice import learning_rate
from launcher.parallel.groups import TensorGroup
from launcher.parallel.world import World, leave
from launcher.strategies.engine import Engine, train_step
from launcher.train import build_engine

STEPS = LEDGER_STEPS[-1]
CALLS: dict[str, Collective] = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_max": "all_reduce",
}


class Meter:
    """Bytes that this rank sends the others of its matrices, by phase of a step."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self._phase = ""
        for name, kind in CALLS.items():
            self._listen(name, kind)

    def _listen(self, name: str, kind: Collective) -> None:
        call = getattr(TensorGroup, name)

        def counted(tensor_group: TensorGroup, x: torch.Tensor) -> Any:
            ranks = tensor_group.rank.size
            size_bytes = x.nbytes * (ranks if kind == "all_gather" else 1)
            self.sent[self._phase] += int(sent_bytes(kind, size_bytes, ranks))
            return call(tensor_group, x)

        setattr(TensorGroup, name, counted)

    @contextlib.contextmanager
    def phase(self, memory: MemoryMeter, name: str) -> Iterator[None]:
        self._phase = name
        with memory.phase(name):
            yield


def main() -> None:
    results, what, layouts = sys.argv[1:]
    world, meter = join("cpu", 0), Meter()
    found: dict[str, Any] = {}
    for name, flags in json.loads(layouts).items():
        run = resolve(parse_run_config(flags), world_size=world.size, device_type="cpu")
        if what == "bytes":
            ranks = gathered(traced(run, world, meter), world)
            found[name] = max(ranks, key=lambda rank: int(rank["peak_bytes"]))
        else:
            found[name] = {"tokens_per_s": tokens_per_s(run, world)}
        gc.collect()  # engines are held in cycles
        if world.is_main:
            print(f"{name}: {found[name]}", flush=True)
    if world.is_main:
        Path(results).write_text(json.dumps(found), encoding="utf-8")
    leave(0, together=True)


def traced(run: Resolved, world: World, meter: Meter) -> dict[str, Any]:
    """The highest moment of a rank's step, what it holds between steps, and what it sends."""
    memory = TracedMemory(world.device)
    with memory.trace:
        engine = build_engine(run, world)
        memory.watch(engine)
        ledger = None
        for step in range(1, STEPS + 1):
            meter.sent.clear()
            memory.begin_step(step)
            take_step(step, engine, run, world, lambda name: meter.phase(memory, name))
            ledger = memory.end_step(step) or ledger
        assert ledger is not None
        held = engine.count_states().ledger(world.device).device
    sent = meter.sent.copy()  # a prediction makes the same calls, to nobody
    release(engine)
    plan = predict(run, rank=world.rank)
    return {
        "peak_bytes": ledger.device.used_bytes,
        "activations_bytes": ledger.device.activations_bytes,
        "states_bytes": held.states_bytes - held.buffers_bytes,
        "predicted_bytes": max(
            size for (period, _), size in plan.peaks.items() if period == "steady"
        ),
        "predicted_activations_bytes": plan.peak.device.activations_bytes,
        "sent_bytes": sent["forward"] + sent["backward"],
        "sent_in_step_bytes": sent["step"],
    }


def tokens_per_s(run: Resolved, world: World) -> float:
    """Return the tokens per second of all ranks, in the median step of those after the first."""
    engine = build_engine(run, world)
    seconds = []
    for step in range(1, STEPS + 1):
        begun_s = time.perf_counter()
        take_step(step, engine, run, world, lambda name: contextlib.nullcontext())
        seconds.append(time.perf_counter() - begun_s)
    release(engine)
    return run.global_batch * run.seq_len / statistics.median(seconds[1:])


def take_step(step: int, engine: Engine, run: Resolved, world: World, phase: Any) -> None:
    micro_batches = made_up(run, world, np.random.default_rng((step, world.rank)))
    lr = learning_rate(step, run.config.optim, STEPS)
    loss, _ = train_step(engine, micro_batches, lr, phase=phase)
    loss.item()


if __name__ == "__main__":
    main()
