"""One rank that takes four steps under each strategy, once plainly and once with a NaN between.

    torchrun --nproc 2 nonfinite_rank.py TEXT FOLDER

The result of a case: {"plain": losses, "disturbed": losses, "applied": [...]}.
"""

import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import MODEL_FLAGS
from rank_loop import rank_of_group, release, report

from launcher.data import GlobalBatches
from launcher.parallel.world import World, ranks_from_environment
from launcher.run.prepare import prepare
from launcher.strategies.engine import train_step
from launcher.train import build_engine, to_device

CASES = {
    "ddp": "--strategy=ddp",
    "fsdp": "--strategy=fsdp",
    "fsdp bf16": "--strategy=fsdp --precision=bf16",
    "fsdp offload": "--strategy=fsdp --offload-optimizer=cpu",
    "zero0": "--zero=0",
    "zero1": "--zero=1",
    "zero2": "--zero=2",
    "zero3": "--zero=3",
    "zero0 bf16": "--zero=0 --precision=bf16",
    "zero1 bf16": "--zero=1 --precision=bf16",
    "zero2 bf16": "--zero=2 --precision=bf16 --grad-accum-dtype=bf16",
    "zero3 bf16": "--zero=3 --precision=bf16",
    "zero3 offload": "--zero=3 --offload-optimizer=cpu",
}
STEPS, POISONED = 4, 2  # the poisoned step comes after this many good ones


def main() -> None:
    text, folder = sys.argv[1:]
    with rank_of_group() as world:
        cases = (({"name": n}, partial(run, f.split(), text, world)) for n, f in CASES.items())
        report(folder, world, cases)


def run(flags: list[str], text: str, world: World) -> dict[str, Any]:
    plain, _ = train(flags, text, world, poison=False)
    disturbed, applied = train(flags, text, world, poison=True)
    return {"plain": plain, "disturbed": disturbed, "applied": applied}


def train(
    flags: list[str], text: str, world: World, *, poison: bool
) -> tuple[list[float], list[bool]]:
    """Losses of the good steps, and for all steps whether they were applied."""
    size, local_size = ranks_from_environment()
    arguments = [*MODEL_FLAGS, *flags, "--micro-batch=2", "--steps=10", f"--data={text}"]
    prepared = prepare(arguments, world_size=size, ranks_per_node=local_size)
    resolved = prepared.resolved
    engine = build_engine(prepared.resolved, world)
    batches = GlobalBatches(
        prepared.corpus.train, seq_len=resolved.seq_len, global_batch=resolved.global_batch, seed=0
    )
    losses, applied = [], []
    for number in range(STEPS):
        rows = batches.rank_slice(number, rank=world.rank, world_size=world.size)
        micro_batches = to_device(rows, 2, world.device)
        if poison and number == POISONED:
            ((tokens, targets),) = micro_batches
            engine.begin_step(0.01)
            loss = engine.forward(tokens, targets, last=True)
            # The other rank has gradients that look healthy.
            engine.backward(loss * (float("nan") if world.rank == 1 else 1.0))
            applied.append(bool(engine.step()[1]))
        loss, (_, is_applied) = train_step(engine, micro_batches, 0.01)
        applied.append(bool(is_applied))
        losses.append(loss)
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    release(engine)
    return (mean / world.size).tolist(), applied


if __name__ == "__main__":
    main()
