"""`--compile`: the same losses, the same names, one graph; and what is refused."""

import multiprocessing
import os
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters, get_optimize_ddp_mode

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import resolve
from launcher.config.schema import RunConfig
from launcher.optim.choice import learning_rate
from launcher.parallel.world import start
from launcher.run.prepare import prepare, with_compilers
from launcher.strategies import compiled as module
from launcher.strategies.compiled import require_compilers
from launcher.strategies.engine import train_step
from launcher.train import build_engine
from launcher.util.errors import UserError

FLAGS = "--device cpu --tokenizer byte --vocab-size 257 --layers 1 --d-model 32 --heads 2"
FLAGS += " --context 32 --micro-batch 2 --window 9 --loss-chunk 40"
FLAGS += " --activation-checkpointing selective --steps 3 --lr 1e-2"
# GPT-2's block is compiled under every strategy by the pairs of docs/matrix.md.
FLAGS += " --position rope --norm rms --activation swiglu --kv-heads 1 --head-dim 20 --qk-norm"
FLAGS += " --bias none"


Run = tuple[list[float], list[str]]
"""Losses of the steps, names of the states."""


def _losses(text: Path, *flags: str) -> Run:
    prepared = prepare(
        [*FLAGS.split(), "--data", str(text), *flags], world_size=1, ranks_per_node=1
    )
    world = start("cpu", timeout_s=60, needs_group=False)
    engine = build_engine(prepared.resolved, world)
    torch.manual_seed(0)
    losses = []
    for step in range(1, 4):
        tokens = torch.randint(0, 257, (2, 32))
        lr = learning_rate(step, prepared.resolved.config.optim, 3)
        batch = [tokens, tokens.roll(-1, 1)]
        if prepared.resolved.config.data.document_attention:
            batch.append(torch.tensor([[0] * 5 + [5] * 27, [0] * 32]))
        loss, _ = train_step(engine, [tuple(batch)], lr)
        losses.append(float(loss))
    return losses, sorted(engine.training_state().shapes)


def _both(text: Path, more: list[str]) -> tuple[Run, Run, int, dict[str, int]]:
    """Train as it is and compiled; returns both, the graphs and why they were broken."""
    eager = _losses(text, *more)
    counters.clear()
    compiled = _losses(text, "--compile", *more)
    return eager, compiled, counters["stats"]["unique_graphs"], dict(counters["graph_break"])


@pytest.fixture(scope="module")
def own_process() -> Iterator[ProcessPoolExecutor]:
    """A process that has compiled nothing else, as a run's: dynamo remembers what it has traced."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--document-attention"],
        ["--mlp-tile=27", "--activation-checkpointing=full"],
    ],
    ids=["", "documents", "tiles in blocks"],
)
def test_compiled_training_is_the_same_training(
    tmp_path: Path, own_process: ProcessPoolExecutor, more: list[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(Path(__file__).read_text() * 20)
    eager, compiled, graphs, breaks = own_process.submit(_both, text, more).result(timeout=300)
    assert compiled[0] == pytest.approx(eager[0], rel=2e-5)
    assert compiled[1] == eager[1]
    assert graphs == 1
    assert not breaks


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_blocks_are_compiled_one_by_one(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole model in one graph holds more, and takes minutes to compile."""
    compiled: list[str] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled.append(type(module).__name__))
    flags = [*FLAGS.split(), "--layers=2", "--compile", f"--strategy={strategy}"]
    config = parse_run_config(flags, world_size=1)
    with mock.patch.dict(os.environ):  # a group of one process says so in there
        world = start("cpu", timeout_s=60, needs_group=strategy == "ddp")
        try:
            build_engine(resolve(config, world_size=1, device_type="cpu"), world)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    assert compiled == ["Block", "Block"]
    assert get_optimize_ddp_mode() == "no_optimization"  # it would cut the block's graph


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"memory_trace": True}, "--memory-trace.*leave one of them out"),
        ({"zero": 3}, "--compile with --zero 3.*use --strategy fsdp"),
        ({"activation_checkpointing": "offload"}, "offload.*use full or selective"),
    ],
)
def test_what_compiling_cannot_go_with_is_refused(changes: dict[str, Any], sentence: str) -> None:
    config = RunConfig().replace(compile=True, **changes)
    with pytest.raises(UserError, match=sentence):
        resolve(config, world_size=2, device_type="cpu" if "memory_trace" in changes else "cuda")


def test_a_missing_compiler_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    require_compilers("cpu")
    for given in ("no-such-compiler", "env g++", ""):  # torch starts it as one word
        monkeypatch.setenv("CXX", given)
        says = rf"'{re.escape(given)}'.*apt-get install g\+\+.*one program without options in CXX"
        with pytest.raises(UserError, match=says):
            require_compilers("cpu")


def test_auto_compiles_nothing_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig().replace(model="gpt2", steps=10**8)
    chosen = resolve(config, world_size=1, device_type="cuda")
    asked = resolve(config.replace(compile=True), world_size=1, device_type="cuda")
    monkeypatch.setattr(module, "find_spec", lambda name: name)
    assert with_compilers(chosen).config.loop.compile is True
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert "builds kernels with triton" in with_compilers(chosen).compile_reason
    monkeypatch.undo()
    monkeypatch.setenv("CC", "no-such-compiler")
    without = with_compilers(chosen)
    assert without.config.loop.compile is False
    assert without.compile_lines()[0].startswith("compile: off (auto: --compile builds")
    with pytest.raises(UserError, match=r"--compile builds kernels with 'no-such-compiler'"):
        with_compilers(asked)
