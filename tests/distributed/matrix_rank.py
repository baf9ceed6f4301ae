"""One of two ranks that train pairs of technique and strategy, one after the other.

    torchrun --nproc 2 matrix_rank.py TEXT FOLDER RUN...

Runs of one process are shared out; the others are trained by both ranks together. Each is a JSON
line with its losses and gradient norms in FOLDER/results-RANK.jsonl.
"""

import contextlib
import json
import math
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matrix_cases import BY_RUN, Case
from rank_loop import freeze_imports, release, steps
from torch._dynamo.utils import counters

from launcher.config.resolve import resolve
from launcher.data import open_corpus
from launcher.forecast.budget import within_budget
from launcher.measure.memory import TracedMemory
from launcher.parallel.world import World, leave, start
from launcher.run.capacity import check_offload
from launcher.strategies.engine import LossScale
from launcher.train import build_engine


def main() -> None:
    text, folder, *runs = sys.argv[1:]
    world = start("cpu", timeout_s=600, needs_group=True)
    alone = replace(world, rank=0, local_rank=0, size=1, local_size=1)
    cases = [BY_RUN[run] for run in runs]
    mine = [case for case in cases if case.alone][world.rank :: world.size]
    together = [case for case in cases if not case.alone]
    freeze_imports()
    with (Path(folder) / f"results-{world.rank}.jsonl").open("a", encoding="utf-8") as file:
        for case in (*mine, *together):
            started_s = time.perf_counter()
            try:
                result = train_case(case, text, folder, alone if case.alone else world)
            except Exception:
                # The same mistake on every rank; the next case can still run.
                result = {"error": traceback.format_exc()}
            result["duration_s"] = time.perf_counter() - started_s
            file.write(json.dumps({"run": case.run, **result}) + "\n")
            file.flush()
    leave(0, together=True)


def train_case(case: Case, text: str, folder: str, world: World) -> dict[str, Any]:
    """What `launcher.train` does, with its checks, less its records."""
    torch._dynamo.reset()  # compiled for one case, a block would count against the next one's limit
    counters.clear()
    config = case.config(text, folder)
    corpus = open_corpus(
        replace(config.data, data=text, tokenizer="byte"), vocab_size=261, seq_len=16
    )
    resolved = resolve(config, world_size=world.size, device_type="cpu")
    resolved = within_budget(resolved, world_size=world.size)
    check_offload(resolved.config, resolved.model, world_size=world.size, ranks_per_node=world.size)
    traced = config.measure.memory_trace
    with TracedMemory(world.device).trace if traced else contextlib.nullcontext():
        torch.manual_seed(world.rank)
        engine = build_engine(resolved, world)
        engine.set_loss_scale(LossScale(scale=1024.0, good_steps=0))  # 65536 overflows at first
        losses, norms = steps(resolved, corpus, world, engine, range(1, resolved.steps + 1))
        assert all(map(math.isfinite, norms))
        release(engine)
    return {"losses": losses, "norms": norms, "graphs": counters["stats"]["unique_graphs"]}


if __name__ == "__main__":
    main()
