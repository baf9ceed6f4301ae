"""One rank of a process group that runs parity cases one after the other.

    torchrun --nproc 2 parity_rank.py TEXT RESULTS CASE...

Rank 0 appends a JSON line with losses and gradient norms to RESULTS for each case.
"""

import json
import math
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import MODEL_FLAGS
from parity_cases import CASES, Case, references
from rank_loop import freeze_imports, release, steps

from launcher.parallel.world import World, leave, ranks_from_environment, start
from launcher.run.prepare import prepare
from launcher.strategies.engine import Engine
from launcher.strategies.native_state import ModelShardState
from launcher.train import build_engine, load_forecast


def main() -> None:
    text, results, *names = sys.argv[1:]
    known = {case.name: case for case in (*references(), *CASES)}
    world = start("cpu", timeout_s=60, needs_group=True)
    freeze_imports()
    with Path(results).open("a", encoding="utf-8") as file:
        for name in names:
            started = time.perf_counter()
            try:
                result: dict[str, Any] = {"name": name, **run(known[name], text, world)}
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
        [*MODEL_FLAGS, *case.arguments(text)],
        world_size=size,
        ranks_per_node=local_size,
        load_forecast=load_forecast,
    )
    resolved = prepared.resolved
    torch.manual_seed(resolved.config.loop.seed + world.rank)
    engine = build_engine(resolved, world)
    losses, norms = steps(resolved, prepared.corpus, world, engine, range(1, case.steps + 1))
    assert all(map(math.isfinite, norms))
    if resolved.config.sharding.tensor_parallel > 1:
        replicated_parameters_agree(engine)
    release(engine)
    return {"losses": losses, "norms": norms}


def replicated_parameters_agree(engine: Engine) -> None:
    """Replicated parameters are the same on all tensor-parallel ranks, bit by bit."""
    state = engine.training_state()
    assert isinstance(state, ModelShardState)
    sums = {
        (shard.name, shard.kind, shard.start): shard.data.double().sum().item()
        for shard in state.loaded()
        if state.shards.of[shard.name].replicated
    }
    tensor_group = state.shards.model_parallel.tensor
    assert tensor_group is not None
    everybody: list[Any] = [None] * tensor_group.rank.size
    dist.all_gather_object(everybody, sums, group=tensor_group.group)
    assert all(other == sums for other in everybody), sums


if __name__ == "__main__":
    main()
