"""One rank of a process group that runs parity cases one after the other.

    torchrun --nproc 2 parity_rank.py TEXT RESULTS CASE...

Rank 0 appends a JSON line with losses and gradient norms to RESULTS for each case.
"""

import gc
import json
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from harness import MODEL_FLAGS
from parity_cases import CASES, Case, references

from launcher.data import GlobalBatches
from launcher.optim import learning_rate
from launcher.preflight import prepare
from launcher.train import build_engine, to_device
from launcher.world import World, leave, ranks_from_environment, start


def main() -> None:
    text, results, *names = sys.argv[1:]
    known = {case.name: case for case in (*references(), *CASES)}
    world = start("cpu", timeout_s=60, needs_group=True)
    with Path(results).open("a", encoding="utf-8") as file:
        for name in names:
            started = time.perf_counter()
            try:
                result = {"name": name, **run(known[name], text, world)}
            except Exception:
                # The same mistake on every rank; the next case can still run.
                result = {"name": name, "error": traceback.format_exc()}
            if world.is_main:
                result["duration_s"] = time.perf_counter() - started
                file.write(json.dumps(result) + "\n")
                file.flush()
    leave(0, together=True)


def run(case: Case, text: str, world: World) -> dict[str, list[float]]:
    """Losses (mean over the global batch) and gradient norms of every step."""
    size, local_size = ranks_from_environment()
    prepared = prepare(
        [*MODEL_FLAGS, *case.arguments(text)], world_size=size, ranks_per_node=local_size
    )
    resolved = prepared.resolved
    config, accumulation, steps = resolved.config, resolved.accumulation, resolved.steps
    torch.manual_seed(config.loop.seed + world.rank)
    engine = build_engine(prepared.resolved, world)
    batches = GlobalBatches(
        prepared.corpus.train,
        seq_len=resolved.seq_len,
        global_batch=resolved.global_batch,
        seed=config.loop.seed,
    )
    losses, norms = [], []
    for step in range(1, steps + 1):
        rows = batches.rank_slice(step - 1, rank=world.rank, world_size=world.size)
        micro_batches = to_device(rows, config.data.micro_batch, world.device)
        assert len(micro_batches) == accumulation
        loss_sum = torch.zeros(())
        for number, (tokens, targets) in enumerate(micro_batches, start=1):
            loss = engine.forward(tokens, targets, last=number == accumulation)
            loss_sum += loss.detach()
            engine.backward(loss)
        result = engine.step(learning_rate(step, config.optim, steps))
        assert result.applied
        losses.append(loss_sum / accumulation)
        norms.append(float(result.grad_norm))
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    release(engine)
    return {"losses": (mean / world.size).tolist(), "norms": norms}


def release(engine: object) -> None:
    """Drop DeepSpeed's hooks and buffers, which hold the model in cycles."""
    deepspeed_engine = getattr(engine, "_engine", None)
    if deepspeed_engine is not None:
        deepspeed_engine.destroy()
    gc.collect()


if __name__ == "__main__":
    main()
