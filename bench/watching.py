"""What `shardscale watch` costs a step: the same process with and without its hooks, in turn.

    python bench/watching.py [STEPS]          # pairs of steps, 60

Trains a small encoder on one core under the observer. Every second step runs with the hooks taken
out of torch, so that both kinds share the machine's ups and downs; seconds are of the processor,
which other processes do not add to. Steps 1 and 3, in which a GPU's allocations are recorded, are
before the measurement. Prints one row per size: the smallest has steps that are all overhead.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SIZES = {"tiny": (12, 32, 1, 16), "small": (4, 128, 4, 64), "medium": (6, 256, 4, 128)}
"""Name -> layers, width, sequences, tokens of each."""
WARMUP = 6


@contextlib.contextmanager
def without_hooks() -> Iterator[None]:
    """Take the observer's hooks out of torch."""
    import torch

    optimizers: Any = sys.modules["torch.optim.optimizer"]
    dictionaries = [
        *(optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks),
    ]
    kept = [dict(dictionary) for dictionary in dictionaries]
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward
    call: Any = torch.nn.Module.__call__
    for dictionary in dictionaries:
        dictionary.clear()
    autograd._engine_run_backward = run.__wrapped__
    torch.nn.Module.__call__ = call.__wrapped__  # type: ignore[method-assign]
    try:
        yield
    finally:
        autograd._engine_run_backward = run
        torch.nn.Module.__call__ = call  # type: ignore[method-assign]
        for dictionary, content in zip(dictionaries, kept, strict=True):
            dictionary.update(content)


def measure(size: str, pairs: int) -> None:
    """Print the seconds of steps with and without hooks, as JSON."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    depth, width, sequences, tokens = SIZES[size]
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    model = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(sequences, tokens, width)

    def step() -> float:
        start = time.process_time()
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - start

    for _ in range(WARMUP):
        step()
    watched: list[float] = []
    alone: list[float] = []
    for pair in range(pairs):
        for is_watched in (True, False) if pair % 2 else (False, True):
            with contextlib.nullcontext() if is_watched else without_hooks():
                (watched if is_watched else alone).append(step())
    modules = len(list(model.modules()))
    print(json.dumps({"watched": watched, "alone": alone, "modules": modules}))


def main(pairs: int) -> None:
    print(f"| size | modules | step alone | added | with / without, median of {pairs} pairs |")
    print("|---|---|---|---|---|")
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            words = ("-m", "launcher", "watch", "--out", f"{folder}/run", "--", sys.executable)
            done = subprocess.run(
                (sys.executable, *words, __file__, "--measure", size, str(pairs)),
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                check=True,
            )
        found = json.loads(done.stdout)
        steps = list(zip(found["watched"], found["alone"], strict=True))
        alone = statistics.median(found["alone"])
        added = statistics.median(watched - alone for watched, alone in steps)
        low, middle, high = statistics.quantiles((watched / alone for watched, alone in steps), n=4)
        print(
            f"| {size} | {found['modules']} | {1e3 * alone:.2f} ms | {1e6 * added:.0f} us "
            f"| {middle:.4f} ({low:.4f} to {high:.4f}) |",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2], int(sys.argv[3]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
