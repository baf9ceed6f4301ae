"""One rank of a process group that runs parity cases one after the other.

    torchrun --nproc 2 parity_rank.py CASES

CASES is a file with a pickled list of them. Those without a group are shared out among the ranks;
all ranks train the others together. Its folder has the data and gets the results: losses and
gradient norms of each case.
"""

import contextlib
import math
import os
import pickle
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from parity_cases import BASE, Case
from rank_loop import rank_of_group, release, report, steps
from torch._dynamo.utils import counters

from launcher.config.resolve import resolve
from launcher.data import open_corpus
from launcher.forecast.budget import within_budget
from launcher.measure.memory import TracedMemory
from launcher.parallel.world import World
from launcher.run.capacity import check_offload
from launcher.strategies.engine import Engine, LossScale
from launcher.strategies.fsdp import grouping
from launcher.strategies.native_state import ModelShardState
from launcher.train import build_engine


def main() -> None:
    with rank_of_group(timeout_s=600) as world:
        alone = replace(world, rank=0, local_rank=0, size=1, local_size=1)
        asked = Path(sys.argv[1])
        os.chdir(asked.parent)
        cases: list[Case] = pickle.loads(asked.read_bytes())
        mine = [case for case in cases if case.alone][world.rank :: world.size]
        together = [case for case in cases if not case.alone]
        work = (({"name": case.name}, partial(run, case, alone)) for case in mine)
        report(".", world, work, every_rank=True)
        report(".", world, (({"name": case.name}, partial(run, case, world)) for case in together))


def run(case: Case, world: World) -> dict[str, Any]:
    """Train a case as `launcher.train` does, with its checks, less its records."""
    with mock.patch.dict(grouping.SHARED_BYTES, cpu=case.shared_bytes):
        return _run(case, world)


def _run(case: Case, world: World) -> dict[str, Any]:
    torch._dynamo.reset()  # compiled for one case, a block would count against the next one's limit
    counters.clear()
    config = case.config()
    resolved = resolve(config, world_size=world.size, device_type="cpu")
    resolved = within_budget(resolved)
    corpus = open_corpus(
        resolved.config.data, vocab_size=BASE["vocab_size"], seq_len=resolved.seq_len
    )
    check_offload(resolved, ranks_per_node=world.size)
    traced = config.measure.memory_trace
    with TracedMemory(world.device).trace if traced else contextlib.nullcontext():
        torch.manual_seed(world.rank)
        engine = build_engine(resolved, world)
        engine.set_loss_scale(LossScale(scale=1024.0, good_steps=0))  # 65536 overflows at first
        losses, norms = steps(resolved, corpus, world, engine, range(1, case.steps + 1))
        assert all(map(math.isfinite, norms))
        if resolved.config.sharding.tensor_parallel > 1:
            replicated_parameters_agree(engine)
        release(engine)
    return {"losses": losses, "norms": norms, "graphs": counters["stats"]["unique_graphs"]}


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
