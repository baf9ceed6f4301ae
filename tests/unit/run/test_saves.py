"""The source of weights that the checkpoints of a run record."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from launcher.checkpoint import Checkpoint, Checkpointer
from launcher.parallel.world import World, start
from launcher.run import provenance
from launcher.run.prepare import Prepared, prepare
from launcher.run.resume import Resume
from launcher.run.run_folder import RunFolder
from launcher.run.saves import Saves, run_entries
from launcher.run.steps import SkippedSteps
from launcher.strategies.engine import Engine, train_step
from launcher.strategies.flat_shards import PARAM
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


def saves_of(run: Prepared, world: World, folder: Path) -> Saves:
    memory: Any = SimpleNamespace(apart=lambda *_: contextlib.nullcontext())
    journal = Mock(skipped=SkippedSteps())
    return Saves(run, world, folder, journal=journal, memory=memory)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("SHARDSCALE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("A text that is read over and over. " * 300)
    return start("cpu", timeout_s=60.0, needs_group=False)


def test_adapters_name_the_weights_that_they_began_beside(world: World, tmp_path: Path) -> None:
    """Though the run that has saved those goes on, and saves others meanwhile."""
    run = prepared(tmp_path, *MODEL)
    RunFolder(tmp_path / "base").begin(run.resolved.config.flat(), reopens=False)
    engine = build_engine(run.resolved, world)
    beside = save(tmp_path / "base", run, engine, 3)

    own = prepared(tmp_path, f"--init-from={tmp_path / 'base'}", "--lora-rank=2")
    saves, adapted = saves_of(own, world, tmp_path / "own"), build_engine(own.resolved, world)
    saves.resume(adapted, Resume(source=None, reopens=False))
    with torch.no_grad():
        for shard in engine.training_state().loaded():
            shard.data.add_(1.0)
    save(tmp_path / "base", run, engine, 6)
    saves.after_training(1, adapted, preempted=False)
    recorded = Checkpoint.open(tmp_path / "own" / "checkpoints" / "step-00000001").extra["base"]
    assert recorded.path == str(beside)
    again = (f"--init-from={tmp_path / 'base'}", "--lora-rank=2", f"--resume={tmp_path / 'own'}")
    assert prepared(tmp_path, *again).resolved.config.model.init_from == beside


def test_all_ranks_begin_with_the_main_ones_newest_checkpoint_of_a_living_run(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepared(tmp_path, *MODEL)
    RunFolder(tmp_path / "alive").begin(run.resolved.config.flat(), reopens=False)
    engine = build_engine(run.resolved, world)
    begun = [s.data.clone() for s in engine.training_state().loaded() if s.kind == PARAM]
    for step in (3, 6):
        save(tmp_path / "alive", run, engine, step)
        for shard in engine.training_state().loaded():
            shard.data.add_(1.0)
    # the main rank has looked before the second save
    monkeypatch.setattr(World, "agreed", lambda self, _: "step-00000003")
    for place in ("alive", "alive/checkpoints/step-00000003"):
        own = prepared(tmp_path, f"--init-from={tmp_path / place}")
        ours = build_engine(own.resolved, world)
        saves_of(own, world, tmp_path / "own").resume(ours, Resume(source=None, reopens=False))
        found = [s.data for s in ours.training_state().loaded() if s.kind == PARAM]
        assert all(map(torch.equal, found, begun))


def test_a_resumed_run_reads_the_weights_beside_its_adapters_once(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One core takes minutes for 100 GB, and other ranks wait."""
    run = prepared(tmp_path, *MODEL, "--lora-rank=2", "--random-base")
    engine, read = build_engine(run.resolved, world), Mock(side_effect=provenance.base_of)
    saves_of(run, world, tmp_path / "own").after_training(1, engine, preempted=False)
    monkeypatch.setattr(provenance, "base_of", read)
    saves = saves_of(run, world, tmp_path / "own")
    assert saves.resume(engine, Resume(source=tmp_path / "own", reopens=True)) == 1
    saves.after_training(2, engine, preempted=False)
    assert read.call_count == 1


def test_tokens_are_counted_over_starts_with_other_batches(world: World, tmp_path: Path) -> None:
    """Also from a checkpoint of an older version, which does not say how many there were."""
    small, large = (prepared(tmp_path, *MODEL, f"--global-batch={n}") for n in (4, 16))
    engine = build_engine(small.resolved, world)
    saves_of(small, world, tmp_path / "own").after_training(3, engine, preempted=False)
    save(tmp_path / "old", small, engine, 3)
    for name in ("own", "old"):
        saves = saves_of(large, world, tmp_path / name)
        assert saves.resume(engine, Resume(source=tmp_path / name, reopens=True)) == 3
        assert saves.tokens_read(5) == (3 * 4 + 2 * 16) * 16


def test_the_dtype_of_the_first_weights_is_carried_on(world: World, tmp_path: Path) -> None:
    """For exports, through --init-from and --resume; the first ones may be gone by then."""
    run = prepared(tmp_path, *MODEL)
    engine = build_engine(run.resolved, world)
    RunFolder(tmp_path / "imported").begin(run.resolved.config.flat(), reopens=False)
    begun = {**run_entries(run.resolved, run.corpus), "dtype": "bfloat16"}
    Checkpointer(tmp_path / "imported" / "checkpoints").save(0, engine, begun)
    tuned = prepared(tmp_path, f"--init-from={tmp_path / 'imported'}")
    first = saves_of(tuned, world, tmp_path / "first")
    first.resume(engine, Resume(source=None, reopens=False))
    first.after_training(3, engine, preempted=False)
    second = saves_of(run, world, tmp_path / "second")
    second.resume(engine, Resume(source=tmp_path / "first", reopens=False))
    second.after_training(6, engine, preempted=False)
    path = tmp_path / "second" / "checkpoints" / "step-00000006"
    assert Checkpoint.open(path).extra["dtype"] == "bfloat16"


@pytest.mark.parametrize("targets", ["qkv,proj", "proj,mlp"])
def test_adapters_of_rank_1_go_on_with_muon(targets: str, world: World, tmp_path: Path) -> None:
    """Most are vectors, which AdamW updates beside it, or all of them are."""
    flags = [*MODEL, "--random-base", "--lora-rank=1", f"--lora-targets={targets}"]
    run = prepared(tmp_path, *flags, "--optimizer=muon")
    engine = build_engine(run.resolved, world)
    tokens = torch.arange(16).view(1, 16)
    train_step(engine, [(tokens, tokens)], 1e-3)
    saves = saves_of(run, world, tmp_path / "own")
    saves.after_training(1, engine, preempted=False)
    assert saves.failure is None
    fresh = build_engine(run.resolved, world)
    assert saves_of(run, world, tmp_path / "own").resume(
        fresh, Resume(source=tmp_path / "own", reopens=True)
    )
    assert fresh.training_state().counters() == {"step": 1.0}
    again = prepared(tmp_path, *flags, "--optimizer=muon", f"--resume={tmp_path / 'own'}")
    assert again.resume.source is not None
