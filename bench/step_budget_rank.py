"""The rank of bench/step_budget.py: one step of a run's flags, operator by operator.

python bench/step_budget_rank.py RESULT.json [launcher.train's flags]
"""

import collections
import contextlib
import ctypes
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import resolve
from launcher.optim import kernels
from launcher.optim.choice import learning_rate
from launcher.parallel.world import World, leave, start
from launcher.strategies.engine import Engine, train_step
from launcher.train import build_engine

# Of kernels that go over what they are given more than once, by the schema alone unseen.
PASSES = {"shardscale::softmax_gradient_": 3}
TIMED_STEPS = 10


@dataclass(slots=True)
class Row:
    """One operator with one set of types, in one phase."""

    calls: int = 0
    size_bytes: int = 0
    flop: float = 0.0

    def add(self, size_bytes: int, flop: float) -> None:
        self.calls += 1
        self.size_bytes += size_bytes
        self.flop += flop


class Budget(TorchDispatchMode):
    """Counts what is dispatched to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "data"
        self.rows: dict[tuple[str, str, str], Row] = collections.defaultdict(Row)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Run compiled blocks compiled under this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = {name: value for name, value in (kwargs or {}).items() if name != "out"}
        tensors = [leaf for leaf in tree_leaves((args, read, out)) if on_device(leaf)]
        if tensors and not is_view(func):
            dtypes = "/".join(sorted({*map(type_of, tensors)}))
            size_bytes = sum(t.numel() * (1 if is_fp8(t) else t.element_size()) for t in tensors)
            size_bytes *= PASSES.get(func._schema.name, 1)
            row = self.rows[self.phase, func._schema.name.split("::")[1], dtypes]
            row.add(size_bytes, flop_of(func, args, kwargs or {}, out))
        return out


def is_fp8(tensor: torch.Tensor) -> bool:
    """Return whether this is torchao's tensor of bytes and a scale, which says 16 bits."""
    return type(tensor).__name__.startswith("Float8")


def type_of(tensor: torch.Tensor) -> str:
    return "float8" if is_fp8(tensor) else str(tensor.dtype).removeprefix("torch.")


def on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


@cache
def is_view(func: Any) -> bool:
    """Return whether an operator moves nothing: it gives another view, or memory to be written."""
    returned = func._schema.returns
    views = any(one.alias_info is not None and not one.alias_info.is_write for one in returned)
    return views or func._schema.name.split("::")[1] in {
        *("detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
        "_unsafe_view",
    }


def flop_of(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Return the FLOP by torch's formulas; half the scores of attention are hidden and skipped."""
    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return 0.0
    known = {name: value for name, value in kwargs.items() if name not in ("out", "out_dtype")}
    operands = [arg for arg in args if not isinstance(arg, torch.dtype)]
    flop = float(formula(*operands, **known, out_val=out))
    return flop / 2 if "attention" in func._schema.name else flop


class Phases:
    """Hears the phases that `train_step` names."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def __call__(self, name: str) -> "Phases":
        self.budget.phase = name
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.budget.phase = "between"


def one_case(flags: Sequence[str], world: World) -> dict[str, Any]:
    """The seconds of a first step; a third step, counted; the fifth one's highest bytes and
    launches; and the host's time of later ones."""
    config = parse_run_config(["--device=cuda", *flags])
    resolved = resolve(config, world_size=world.size, device_type="cuda")
    if resolved.config.loop.compiles:
        inductor: Any = importlib.import_module("torch._inductor.config")
        inductor.benchmark_kernel = True  # kernels know their bytes
    engine = build_engine(resolved, world)
    tokens = torch.zeros(config.data.micro_batch, resolved.seq_len, dtype=torch.int64)
    batch = [(tokens.to(world.device), tokens.to(world.device))]
    lr = learning_rate(1, config.optim, 3)
    budget = Budget()
    began = time.perf_counter()
    take_step(engine, batch, lr, Phases(Budget()))
    first_step_s = time.perf_counter() - began
    take_step(engine, batch, lr, Phases(Budget()))  # in which DDP fills its buckets anew
    with budget, updates_counted(budget), compiled_counted(budget):
        take_step(engine, batch, lr, Phases(budget))
    take_step(engine, batch, lr, Phases(Budget()))  # in which CUDA graphs are recorded
    torch.cuda.reset_peak_memory_stats()
    is_null_gpu = "SHARDSCALE_NULL_GPUS" in os.environ
    launches = ctypes.CDLL(None).device_launches if is_null_gpu else lambda: 0
    before = launches()
    take_step(engine, batch, lr, Phases(Budget()))
    launched = launches() - before
    host_ms = []
    for _ in range(TIMED_STEPS):
        began = time.perf_counter()
        take_step(engine, batch, lr, Phases(Budget()))
        host_ms.append(1e3 * (time.perf_counter() - began))
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "allocated_peak_bytes": torch.cuda.max_memory_allocated(),
        "launches": launched if is_null_gpu else None,
        "first_step_s": first_step_s,
        # With a GPU the host waits for it where a queue is full.
        "host_ms": statistics.median(host_ms) if is_null_gpu else None,
        "rows": [
            {"phase": phase, "operator": operator, "types": types, **counted(row)}
            for (phase, operator, types), row in budget.rows.items()
        ],
    }


@contextlib.contextmanager
def updates_counted(budget: Budget) -> Iterator[None]:
    """Kernels of low-precision optimizers are launched past the dispatcher: they read a gradient,
    and read and write all else, once."""
    module: Any = kernels
    update = kernels.update

    def counted_update(
        weight: torch.Tensor, gradient: torch.Tensor, state: Any, *others: Any
    ) -> None:
        update(weight, gradient, state, *others)
        kept = [weight, *(value for value in state.values() if isinstance(value, torch.Tensor))]
        size_bytes = gradient.nbytes + 2 * sum(tensor.nbytes for tensor in kept)
        types = "/".join(sorted({str(t.dtype).removeprefix("torch.") for t in (gradient, *kept)}))
        budget.rows[budget.phase, "low-precision update", types].add(size_bytes, 0.0)

    module.update = counted_update
    try:
        yield
    finally:
        module.update = update


@contextlib.contextmanager
def compiled_counted(budget: Budget) -> Iterator[None]:
    """Kernels of compiled blocks are launched past the dispatcher, with torch's own estimate of
    the bytes that each reads and writes."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    module: Any = CachingAutotuner
    run = module.run

    def counted_run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [arg for arg in args if on_device(arg)]
        types = "/".join(sorted({*map(type_of, tensors)}))
        size_bytes = round(1e9 * kernel.inductor_meta["kernel_num_gb"])
        budget.rows[budget.phase, kernel.fn.__name__, types].add(size_bytes, 0.0)
        return run(kernel, *args, **kwargs)

    module.run = counted_run
    try:
        yield
    finally:
        module.run = run


def take_step(engine: Engine, batch: Any, lr: float, phases: Phases) -> None:
    train_step(engine, batch, lr, phase=phases)


def counted(row: Row) -> dict[str, float]:
    return {
        "calls": row.calls,
        "bytes": row.size_bytes,
        "flop": row.flop,
    }


def main() -> None:
    found, *flags = sys.argv[1:]
    world = start("cuda", timeout_s=300, needs_group=True)
    Path(found).write_text(json.dumps(one_case(flags, world)))
    leave(0, together=True)


if __name__ == "__main__":
    main()
