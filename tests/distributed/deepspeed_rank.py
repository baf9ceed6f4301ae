"""One rank of a process group that trains with one DeepSpeed file after the other.

    torchrun --nproc 2 deepspeed_rank.py TEXT FOLDER

FOLDER/runs.json maps names to arguments. The result of each: losses, gradient norms, and how far
the training state covers the model.
"""

import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import MODEL_FLAGS
from rank_loop import rank_of_group, release, report, steps

from launcher.parallel.world import World, ranks_from_environment
from launcher.run.prepare import prepare
from launcher.strategies.engine import Engine
from launcher.train import build_engine


def main() -> None:
    text, folder = sys.argv[1:]
    runs = json.loads((Path(folder) / "runs.json").read_text(encoding="utf-8"))
    with rank_of_group() as world:
        cases = (({"name": name}, partial(run, argv, text, world)) for name, argv in runs.items())
        report(folder, world, cases)


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
    """Return the sum over all ranks of each kind of state that a checkpoint would hold; 'whole' is
    1 where every element is there once."""
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
