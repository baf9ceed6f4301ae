"""What ranks of tests have in common: their process group, the file of their results, and the loop
of `launcher.train` without its records."""

import functools
import gc
import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from launcher.config.resolve import Resolved
from launcher.data import Corpus, GlobalBatches
from launcher.optim.choice import learning_rate
from launcher.parallel.mesh import Mesh
from launcher.parallel.world import World, leave, start
from launcher.strategies.engine import Engine, train_step
from launcher.strategies.zero.engine import import_deepspeed
from launcher.train import to_device

Work = Iterable[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]
"""Pieces of work, each with the key that its result is looked up by."""


@contextmanager
def rank_of_group(timeout_s: float = 60) -> Iterator[World]:
    """This process among those that torchrun has started, or alone, on the CPU."""
    world = start("cpu", timeout_s=timeout_s, needs_group="RANK" in os.environ)
    # What is large is imported now, so that it is never searched for what a case can drop, which
    # would take longer than most cases.
    import_deepspeed(torch.device("cpu"))
    from deepspeed.utils import numa

    # Asked of a process that is started, nine times for each engine.
    cores = functools.cache(numa.get_numa_cores)
    with (
        mock.patch.object(device_mesh, "new_group", shared(dist.new_group)),
        mock.patch.object(numa, "get_numa_cores", cores),
    ):
        yield world
    leave(0, together=True)


def shared(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """Give all meshes of the same ranks one group.

    Each has threads, which wake up a hundred times a second, and those of hundreds of cases would
    take more time than the cases.
    """
    made: dict[tuple[int, ...], Any] = {}

    def group_of(ranks: Sequence[int], **options: Any) -> Any:
        key = tuple(ranks)
        if key not in made:
            made[key] = new_group(ranks=ranks, **options)
        return made[key]

    return group_of


def report(folder: str | Path, world: World, work: Work, *, every_rank: bool = False) -> None:
    """Do the work, and append a JSON line of each piece to FOLDER/results-RANK.jsonl.

    Rank 0 reports for all, or every rank for itself. What a piece raises is its result: it is the
    same mistake on every rank, and the next piece can still run.
    """
    with (Path(folder) / f"results-{world.rank}.jsonl").open("a", encoding="utf-8") as file:
        for key, run in work:
            started_s = time.perf_counter()
            try:
                result = run()
            except Exception:
                result = {"error": traceback.format_exc()}
            if world.is_main or every_rank:
                result["duration_s"] = time.perf_counter() - started_s
                file.write(json.dumps({**key, **result}) + "\n")
                file.flush()


def of_all_ranks(mine: Any, world: World) -> list[Any]:
    """Return what each rank has found, on every rank."""
    found = [mine] * world.size
    if world.size > 1:
        dist.all_gather_object(found, mine)
    return found


def steps(
    resolved: Resolved, corpus: Corpus, world: World, engine: Engine, numbers: range
) -> tuple[list[float], list[float]]:
    """Losses (mean over the global batch) and gradient norms of the numbered steps;
    a norm that is not finite is a step that was skipped."""
    config = resolved.config
    batches = GlobalBatches(
        corpus.train,
        seq_len=resolved.seq_len,
        global_batch=resolved.global_batch,
        seed=config.loop.seed,
    )
    mesh = Mesh.at(world.rank, world.size, config.sharding)
    positions = mesh.positions(resolved.seq_len)
    losses, norms = [], []
    for step in numbers:
        lr = learning_rate(step, config.optim, resolved.steps)
        mine = batches.rank_slice(step - 1, rank=mesh.data_rank, world_size=mesh.data_ranks)
        micro_batch = config.data.micro_batch
        micro_batches = to_device(mine, micro_batch, world.device, positions)
        weights = batches.weights(step - 1, mine, micro_batch=micro_batch, positions=positions)
        assert len(micro_batches) == resolved.accumulation
        loss, (norm, _) = train_step(engine, micro_batches, lr, weights=weights)
        losses.append(loss)
        norms.append(float(norm))
    mean = torch.stack(losses)
    if world.size > 1:
        dist.all_reduce(mean)
    return (mean / world.size).tolist(), norms


def release(engine: object) -> None:
    """Drop DeepSpeed's hooks and buffers, which hold the model in cycles."""
    engine = getattr(engine, "inner", engine)  # with masks around it
    deepspeed_engine = getattr(engine, "_engine", None)
    if deepspeed_engine is not None:
        deepspeed_engine.destroy()
        from deepspeed.utils import groups

        groups.mpu = None  # which the next engine would ask, if it has none of its own
    gc.collect()
    gc.freeze()  # what is left are torch's caches, which no later case need search
