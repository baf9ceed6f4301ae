"""One rank of the process group that counts bytes, case after case.

    torchrun --nproc 4 memory_rank.py TEXT DEEPSPEED_JSON FOLDER CASE...

The result of a case: for each moment and rank, what the engine counts and what the interpreter
really keeps alive.
"""

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from harness import MODEL_FLAGS
from memory_cases import CASES, INPUTS_BYTES, Case
from rank_loop import of_all_ranks, rank_of_group, release, report
from torch.distributed.tensor import DTensor

from launcher.data import GlobalBatches
from launcher.parallel.world import World
from launcher.run.prepare import prepare
from launcher.strategies.engine import Engine, train_step
from launcher.train import build_engine, to_device


def main() -> None:
    text, deepspeed, folder, *names = sys.argv[1:]
    known = {case.name: case for case in CASES}
    with rank_of_group() as world:
        cases = (({"name": n}, partial(run, known[n], text, deepspeed, world)) for n in names)
        report(folder, world, cases)


def run(case: Case, text: str, deepspeed: str, world: World) -> dict[str, Any]:
    """On every rank: one step, so that all is allocated, and then a look at each moment."""
    arguments = [
        *MODEL_FLAGS,
        *case.flags,
        f"--precision={case.precision}",
        f"--data={text}",
        "--micro-batch=1",
        f"--global-batch={2 * world.size}",
    ]
    if "--zero=3" in case.flags:
        arguments.append(f"--deepspeed={deepspeed}")
    prepared = prepare(arguments, world_size=world.size, ranks_per_node=world.size)
    resolved = prepared.resolved
    gc.collect()
    gc.freeze()  # what is there already is neither searched nor counted
    engine = build_engine(prepared.resolved, world)
    batches = GlobalBatches(
        prepared.corpus.train, seq_len=resolved.seq_len, global_batch=resolved.global_batch, seed=0
    )
    seen: dict[str, Any] = {}
    moments = iter(("accumulating", "after_backward"))

    @contextmanager
    def looking(phase: str) -> Iterator[None]:
        yield
        if phase == "backward":
            seen[next(moments)] = look(engine)

    for step in range(2):
        rows = batches.rank_slice(step, rank=world.rank, world_size=world.size)
        phase = looking if step == 1 else nullcontext
        train_step(engine, to_device(rows, 1, world.device), 1e-3, phase=phase)
    seen["after_step"] = look(engine)
    release(engine)
    mine = {"parameters": resolved.model.parameter_count, **seen}
    return {"ranks": of_all_ranks(mine, world)}


def look(engine: Engine) -> dict[str, Any]:
    """The ledger's device lines, and the bytes that are alive without asking the engine."""
    for _ in range(50):
        gc.collect()
        lines = engine.count_states().ledger(torch.device("cpu")).device
        alive = sum(live_storages().values())
        if alive - lines.states_bytes <= INPUTS_BYTES:
            break
        time.sleep(0.1)  # gloo's own thread lets go of what it sent a moment after the call
    return {"ledger": asdict(lines), "states_bytes": lines.states_bytes, "alive_bytes": alive}


def live_storages() -> dict[int, int]:
    """Address -> bytes of the storage of every tensor that the interpreter can reach."""
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and not issubclass(type(thing), DTensor):
            storage = thing.untyped_storage()
            if storage.device.type == "cpu" and storage.data_ptr():
                found[storage.data_ptr()] = storage.nbytes()
    return found


if __name__ == "__main__":
    main()
