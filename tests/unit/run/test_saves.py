"""What a run's checkpoints record of where its weights come from."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from launcher.checkpoint import Checkpoint, Checkpointer
from launcher.parallel.world import start
from launcher.run.prepare import Prepared, prepare
from launcher.run.resume import Resume
from launcher.run.run_folder import RunFolder
from launcher.run.saves import Saves, run_entries
from launcher.run.steps import SkippedSteps
from launcher.strategies.engine import Engine
from launcher.train import build_engine

MODEL = ["--layers=1", "--d-model=48", "--heads=2", "--context=16", "--vocab-size=257"]


def prepared(folder: Path, *flags: str) -> Prepared:
    argv = ["--device=cpu", "--tokenizer=byte", "--steps=9", f"--data={folder / 'text.txt'}"]
    return prepare([*argv, *flags], world_size=1, ranks_per_node=1)


def save(folder: Path, run: Prepared, engine: Engine, step: int) -> Path:
    extra = run_entries(run.resolved, run.corpus)
    saved = Checkpointer(folder / "checkpoints").save(step, engine, extra)
    assert saved is not None
    return saved.path


def test_adapters_name_the_weights_that_they_began_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the run that has saved those goes on, and saves others meanwhile."""
    monkeypatch.setenv("SHARDSCALE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("A text that is read over and over. " * 300)
    world = start("cpu", timeout_s=60.0, needs_group=False)
    run = prepared(tmp_path, *MODEL)
    RunFolder(tmp_path / "base").begin(run.resolved.config.flat(), reopens=False)
    engine = build_engine(run.resolved, world)
    beside = save(tmp_path / "base", run, engine, 3)

    own = prepared(tmp_path, f"--init-from={tmp_path / 'base'}", "--lora-rank=2")
    memory: Any = SimpleNamespace(apart=lambda *_: contextlib.nullcontext())
    saves = Saves(
        own.resolved,
        own.corpus,
        world,
        tmp_path / "own",
        journal=Mock(),
        console=Mock(),
        agreement=Mock(),
        skipped=SkippedSteps(),
        memory=memory,
    )
    adapted = build_engine(own.resolved, world)
    saves.resume(adapted, Resume(source=None, reopens=False))
    with torch.no_grad():
        for shard in engine.training_state().loaded():
            shard.data.add_(1.0)
    save(tmp_path / "base", run, engine, 6)
    saves.after_training(1, adapted, preempted=False)
    recorded = Checkpoint.open(tmp_path / "own" / "checkpoints" / "step-00000001").extra["base"]
    assert recorded.path == str(beside)
