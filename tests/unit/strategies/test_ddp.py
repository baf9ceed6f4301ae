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
from launcher.strategies.ddp.forecast import sent_copies
from launcher.strategies.engine import train_step
from launcher.train import build_engine

FLAGS = "--device cpu --tokenizer byte --vocab-size 257 --layers 3 --d-model 32 --heads 2"
FLAGS += " --context 32 --micro-batch 2 --strategy ddp"


class Calls(TorchDispatchMode):
    """Counts operators by name, and keeps the sizes of what they concatenate."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()
        self.joined_bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[func._schema.name] += 1
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cat.default:
            self.joined_bytes.append(result.nbytes)
        return result


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


def test_the_copies_that_are_sent_at_first_are_as_predicted() -> None:
    """By torch's own function, which DDP's constructor calls."""
    sizes = {torch.float32: (300, 20, 240, 100, 7), torch.bfloat16: (10, 500, 600, 3)}
    tensors = [torch.zeros(n, dtype=dtype) for dtype in sizes for n in sizes[dtype]]
    tensors = [tensors[i] for i in (0, 5, 1, 2, 3, 6, 4, 7, 8)]  # types by turns
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.distributed_c10d._get_default_group()
    try:
        with Calls() as calls:
            dist._broadcast_coalesced(group, tensors, 1000, 0)
    finally:
        dist.destroy_process_group()
    copies = sent_copies([(t.element_size(), t.numel()) for t in tensors], limit_bytes=1000)
    assert list(filter(None, copies)) == calls.joined_bytes
    assert len(copies) == calls.of["c10d::broadcast_"] > len(calls.joined_bytes) > 2
