"""One rank of a process group that trains with one DeepSpeed file after the other.

    torchrun --nproc 2 deepspeed_rank.py TEXT FOLDER

FOLDER holds NAME.json files of {"argv": [...], "file": {...}}; rank 0 writes NAME.result with
losses, gradient norms, and how far the training state covers the model.
"""

import json
import math
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import MODEL_FLAGS
from rank_loop import freeze_imports, release, steps

from launcher.parallel.world import World, leave, ranks_from_environment, start
from launcher.run.prepare import prepare
from launcher.strategies.engine import Engine
from launcher.train import build_engine


def main() -> None:
    text, folder = sys.argv[1], Path(sys.argv[2])
    world = start("cpu", timeout_s=60, needs_group=True)
    freeze_imports()
    for path in sorted(folder.glob("*.json")):
        case = json.loads(path.read_text())
        try:
            result = run(case["argv"], text, world)
        except Exception:
            # The same mistake on every rank; the next case can still run.
            result = {"error": traceback.format_exc()}
        if world.is_main:
            path.with_suffix(".result").write_text(json.dumps(result))
    leave(0, together=True)


def run(argv: list[str], text: str, world: World) -> dict[str, Any]:
    size, local_size = ranks_from_environment()
    prepared = prepare(
        [*MODEL_FLAGS, f"--data={text}", *argv], world_size=size, ranks_per_node=local_size
    )
    resolved = prepared.resolved
    torch.manual_seed(resolved.config.loop.seed + world.rank)
    engine = build_engine(resolved, world)
    losses, norms = steps(resolved, prepared.corpus, world, engine, range(1, resolved.steps + 1))
    state = state_of(engine, world)
    release(engine)
    precision = resolved.config.optim.precision
    return {"losses": losses, "norms": norms, "state": state, "precision": precision}


def state_of(engine: Engine, world: World) -> dict[str, float]:
    """Of each kind of state that a checkpoint would hold: the sum over all ranks; 'whole' is 1
    where every element is there once."""
    state = engine.training_state()
    names = sorted(state.kinds)
    sums = torch.zeros(len(names) + 1, dtype=torch.float64)
    for shard in state.saved():
        # Weighted by place: a range that came out in another place is another sum.
        places = torch.arange(shard.start, shard.stop, dtype=torch.float64) % 97 + 1
        sums[names.index(shard.kind)] += (shard.data.double() * places).sum()
        sums[-1] += shard.data.numel()
    if world.size > 1:
        dist.all_reduce(sums)
    elements = len(names) * sum(map(math.prod, state.shapes.values()))
    return {**dict(zip(names, sums.tolist(), strict=False)), "whole": sums[-1].item() / elements}


if __name__ == "__main__":
    main()
