"""What one training step asks of a GPU, operator by operator, and what that takes at ideal rates.

    python bench/step_budget.py [--cases bf16 ...] [--top 12] [--output bench/results/step_budget]

Every operator that a step dispatches is written down with its types, the bytes of the tensors it
reads and writes, and its FLOP; it is charged the longer of the two at 4.3 TB/s and 790 TFLOP/s,
which an H200's memory and bf16 matmuls come to. Sums are what no kernel can beat, and say which
operators are worth another kernel; they are not a measurement of speed. Needs torch's CUDA build
and a GPU or its stand-in (launcher/tools/rehearse): with the latter allocator, streams and choice
of kernels are real, and no kernel runs.
"""

import argparse
import collections
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import runs
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

BYTES_PER_S, FLOP_PER_S = 4.3e12, 790e12
# Of kernels that go over what they are given more than once, by the schema alone unseen.
PASSES = {"shardscale::softmax_gradient_": 3}
GIB = 2**30
SEED = ("--model=seed-134m", "--micro-batch=125")
CASES: dict[str, tuple[str, ...]] = {
    "fp32": ("--precision=fp32",),
    "bf16": ("--precision=bf16",),
    "bf16, selective": ("--precision=bf16", "--activation-checkpointing=selective"),
    "bf16, full": ("--precision=bf16", "--activation-checkpointing=full"),
    "bf16, FSDP": ("--precision=bf16", "--strategy=fsdp"),
    "bf16, DDP": ("--precision=bf16", "--strategy=ddp"),
    "bf16-pure": ("--precision=bf16-pure", "--betas", "0.9", "0.99"),
    "bf16-pure, 8-bit, full": (
        *("--precision=bf16-pure", "--optimizer=adamw8bit", "--activation-checkpointing=full"),
    ),
    "bf16-pure, 8-bit, full, in backward": (
        *("--precision=bf16-pure", "--optimizer=adamw8bit", "--activation-checkpointing=full"),
        *("--optimizer-in-backward", "--clip=0"),
    ),
    "bf16-pure, 8-bit, offload, in backward": (
        *("--precision=bf16-pure", "--optimizer=adamw8bit", "--activation-checkpointing=offload"),
        *("--optimizer-in-backward", "--clip=0"),
    ),
}


@dataclass(slots=True)
class Row:
    """One operator with one set of types, in one phase."""

    calls: int = 0
    size_bytes: int = 0
    flop: float = 0.0
    ideal_ms: float = 0.0

    def add(self, size_bytes: int, flop: float) -> None:
        self.calls += 1
        self.size_bytes += size_bytes
        self.flop += flop
        self.ideal_ms += 1e3 * max(size_bytes / BYTES_PER_S, flop / FLOP_PER_S)


class Budget(TorchDispatchMode):
    """Counts what is dispatched to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "data"
        self.rows: dict[tuple[str, str, str], Row] = collections.defaultdict(Row)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if on_device(leaf)]
        if tensors and not is_view(func):
            dtypes = "/".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))
            size_bytes = sum(t.numel() * t.element_size() for t in tensors)
            size_bytes *= PASSES.get(func._schema.name, 1)
            row = self.rows[self.phase, func._schema.name.split("::")[1], dtypes]
            row.add(size_bytes, flop_of(func, args, kwargs or {}, out))
        return out


def on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


@cache
def is_view(func: Any) -> bool:
    """Whether an operator moves nothing: it gives another view, or memory to be written."""
    returned = func._schema.returns
    views = any(one.alias_info is not None and not one.alias_info.is_write for one in returned)
    return views or func._schema.name.split("::")[1] in {
        *("detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
        "_unsafe_view",
    }


def flop_of(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """By torch's own formulas; of the scores of attention, half are hidden and skipped."""
    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return 0.0
    known = {name: value for name, value in kwargs.items() if name != "out_dtype"}
    operands = [arg for arg in args if not isinstance(arg, torch.dtype)]
    flop = float(formula(*operands, **known, out_val=out))
    return flop / 2 if "attention" in func._schema.name else flop


class Phases:
    """What `train_step` names its phases to."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def __call__(self, name: str) -> "Phases":
        self.budget.phase = name
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.budget.phase = "between"


def one_case(name: str, world: World) -> dict[str, Any]:
    """A second step of a run, counted, and the third one's highest bytes."""
    config = parse_run_config(["--device=cuda", *SEED, *CASES[name]])
    resolved = resolve(config, world_size=1, device_type="cuda")
    engine = build_engine(resolved, world)
    tokens = torch.zeros(config.data.micro_batch, resolved.seq_len, dtype=torch.int64)
    batch = [(tokens.to(world.device), tokens.to(world.device))]
    lr = learning_rate(1, config.optim, 3)
    budget = Budget()
    take_step(engine, batch, lr, Phases(Budget()))
    with budget, updates_counted(budget):
        take_step(engine, batch, lr, Phases(budget))
    torch.cuda.reset_peak_memory_stats()
    take_step(engine, batch, lr, Phases(Budget()))
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "allocated_peak_bytes": torch.cuda.max_memory_allocated(),
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


def in_a_process(name: str) -> dict[str, Any]:
    """Its own, since what engines register with autograd and groups outlives them."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "case.json"
        runs.run_ranks([__file__, "--only", name, str(found)], ranks=1)
        content: dict[str, Any] = json.loads(found.read_text())
    return content


def take_step(engine: Engine, batch: Any, lr: float, phases: Phases) -> None:
    train_step(engine, batch, lr, phase=phases)


def counted(row: Row) -> dict[str, float]:
    return {
        "calls": row.calls,
        "bytes": row.size_bytes,
        "flop": row.flop,
        "ideal_ms": row.ideal_ms,
    }


def total(case: dict[str, Any], key: str, phase: str | None = None) -> float:
    return float(sum(row[key] for row in case["rows"] if phase in (None, row["phase"])))


def summary(cases: dict[str, dict[str, Any]]) -> str:
    titles = ["seed-134m, 125 x 256", "operators", "GB", "TFLOP", "forward", "backward", "step"]
    rows = [
        [
            name,
            f"{total(case, 'calls'):.0f}",
            f"{total(case, 'bytes') / 1e9:.1f}",
            f"{total(case, 'flop') / 1e12:.1f}",
            *(f"{total(case, 'ideal_ms', p):.1f}" for p in ("forward", "backward", "step")),
            f"{total(case, 'ideal_ms'):.1f}",
            f"{case['allocated_peak_bytes'] / GIB:.2f}",
        ]
        for name, case in cases.items()
    ]
    return runs.table([*titles, "ideal ms", "allocated GiB"], rows)


def most(case: dict[str, Any], count: int) -> str:
    """The operators that take longest."""
    longest = sorted(case["rows"], key=lambda row: -row["ideal_ms"])[:count]
    rows = [
        [
            f"{row['operator']} ({row['types']})",
            row["phase"],
            str(row["calls"]),
            f"{row['bytes'] / 1e9:.2f}",
            f"{row['flop'] / 1e12:.2f}",
            f"{row['ideal_ms']:.2f}",
        ]
        for row in longest
    ]
    return runs.table(["operator", "phase", "calls", "GB", "TFLOP", "ideal ms"], rows)


def main() -> None:
    if sys.argv[1:2] == ["--only"]:
        name, found = sys.argv[2:]
        world = start("cuda", timeout_s=300, needs_group=True)
        Path(found).write_text(json.dumps(one_case(name, world)))
        leave(0, together=True)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--top", type=int, default=12)
    parser.add_argument("--output", type=Path, default=None, help="without its .json and .md")
    options = parser.parse_args()
    if options.output is not None:
        runs.refuse_existing(options.output.with_suffix(".json"))
    cases = {}
    for name in options.cases:
        cases[name] = in_a_process(name)
        print(f"{name}\n{most(cases[name], options.top)}\n", file=sys.stderr, flush=True)
    ran = "no kernels run" if "SHARDSCALE_STAND_IN_GPUS" in os.environ else "a GPU"
    text = f"Real allocator, {ran}; ideal rates.\n\n{summary(cases)}\n"
    print(text)
    if options.output is not None:
        content = json.dumps({"ran": ran, "cases": cases}, indent=1)
        options.output.with_suffix(".json").write_text(content + "\n")
        longest = "\n\n".join(
            f"{name}:\n\n{most(case, options.top)}" for name, case in cases.items()
        )
        options.output.with_suffix(".md").write_text(f"{text}\n{longest}\n")


if __name__ == "__main__":
    main()
