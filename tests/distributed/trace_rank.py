"""One rank that compares `--memory-trace` with counts that know nothing of it.

    torchrun --nproc N trace_rank.py TEXT FOLDER

The allocator's own events (torch.profiler) give the true height of a step's peak; saved-tensor
hooks give what autograd really keeps for the backward.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from harness import MODEL_FLAGS
from rank_loop import of_all_ranks, rank_of_group, release, report
from torch.profiler import ProfilerActivity, profile

from launcher.data import GlobalBatches
from launcher.measure.memory import TracedMemory
from launcher.parallel.world import World
from launcher.run.prepare import prepare
from launcher.strategies.engine import train_step
from launcher.train import build_engine, to_device

STRATEGIES = {
    "ddp": ["--strategy=ddp"],
    "fsdp": ["--strategy=fsdp"],
    "zero0": ["--zero=0"],
    "zero1": ["--zero=1"],
    "zero2": ["--zero=2"],
    "zero3": ["--zero=3"],
}
TRACED_STEP = 3


def main() -> None:
    text, folder = sys.argv[1:]
    with rank_of_group() as world:
        cases = (({"name": n}, partial(compare, f, text, world)) for n, f in STRATEGIES.items())
        report(folder, world, cases)


def compare(flags: list[str], text: str, world: World) -> dict[str, Any]:
    # Whole logits: their peak is where no message is on its way, whose buffers the allocator may
    # see a moment longer than the trace does.
    whole = ["--micro-batch=16", "--loss-chunk=0"]
    arguments = [*MODEL_FLAGS, *flags, f"--data={text}", *whole]
    prepared = prepare(arguments, world_size=world.size, ranks_per_node=world.size)
    resolved = prepared.resolved
    memory = TracedMemory(world.device)
    found: dict[str, Any] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        saved: dict[int, torch.UntypedStorage] = {}
        with memory.phase(name), saved_tensors(saved) if name == "forward" else nullcontext():
            yield
        if name == "forward":
            # Sizes as they are now: FSDP has already freed the weights it had gathered.
            held = engine.count_states().owners
            found["saved_bytes"] = sum(s.nbytes() for key, s in saved.items() if key not in held)
            saved.clear()  # the graph holds the hook, and so would hold them until it is gone

    with memory.trace:
        engine = build_engine(prepared.resolved, world)
        memory.watch(engine)
        batches = GlobalBatches(
            prepared.corpus.train,
            seq_len=resolved.seq_len,
            global_batch=resolved.global_batch,
            seed=0,
        )
        for step in range(1, TRACED_STEP + 1):
            recorder = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            memory.begin_step(step)
            before = settled_bytes(memory) if step == TRACED_STEP else 0
            with recorder:
                with memory.phase("data"):
                    rows = batches.rank_slice(step, rank=world.rank, world_size=world.size)
                    micro_batches = to_device(rows, 16, world.device)
                train_step(engine, micro_batches, 1e-3, phase=phase)
            ledger = memory.end_step(step)
            if step == TRACED_STEP:
                assert ledger is not None
                found |= {
                    "ledger": ledger.as_dict()["device"],
                    "states_before_bytes": before,
                    "true_peak_bytes": before + highest(recorder),
                }
            del micro_batches
    release(engine)
    return {"ranks": of_all_ranks(found, world)}


def settled_bytes(memory: TracedMemory) -> int:
    """Live bytes when gloo's threads have dropped what the last collectives used.

    They do so when they get to run, on a busy machine in the middle of the profiler's start: a
    buffer that is counted as alive, and whose end the profiler does not see.
    """
    while True:
        size = memory.trace.current_bytes
        time.sleep(0.5)
        if memory.trace.current_bytes == size:
            return size


def saved_tensors(
    found: dict[int, torch.UntypedStorage],
) -> torch.autograd.graph.saved_tensors_hooks:
    """Note the storage of everything that autograd keeps."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def highest(recorder: profile) -> int:
    """Return how many bytes the allocator's events climb above where they began."""
    level = top = 0
    profiled: Any = recorder.profiler
    events = profiled.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            level += event.nbytes()
            top = max(top, level)
    return top


if __name__ == "__main__":
    main()
