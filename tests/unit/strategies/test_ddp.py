"""DDP averages whole buckets: no operator of its own for each gradient but its arrival."""

import os
from collections import Counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import resolve
from launcher.parallel.world import start
from launcher.strategies.engine import train_step
from launcher.train import build_engine

FLAGS = "--device cpu --tokenizer byte --vocab-size 257 --layers 3 --d-model 32 --heads 2"
FLAGS += " --context 32 --micro-batch 2 --strategy ddp"


class Calls(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def test_gradients_are_divided_by_bucket() -> None:
    resolved = resolve(parse_run_config(FLAGS.split(), 1), world_size=1, device_type="cpu")
    with mock.patch.dict(os.environ):  # a group of one process says so in there
        world = start("cpu", timeout_s=60, needs_group=True)
        try:
            engine = build_engine(resolved, world)
            tokens = torch.randint(0, 257, (2, 32))
            for _ in range(2):  # buckets are filled anew after the first
                train_step(engine, [(tokens, tokens)], 1e-3)
            with Calls() as calls:
                train_step(engine, [(tokens, tokens)], 1e-3)
        finally:
            dist.destroy_process_group()
    gradients = len(list(engine.training_state().shapes))
    assert gradients > 30
    assert calls.of["c10d::allreduce_"] == 1
    assert calls.of["aten::div_"] <= 2
