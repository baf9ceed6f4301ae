"""Defaults of learning rate, schedule and weight decay follow the task, and a resume keeps them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from launcher.checkpoint import Checkpoint, Checkpointer
from launcher.checkpoint.document import digest
from launcher.config.arguments import parse_run_config
from launcher.config.resolve import resolve
from launcher.config.schema import RunConfig
from launcher.optim.choice import OptimChoice, learning_rate
from launcher.parallel.world import start
from launcher.run.prepare import Prepared, prepare, saved_by
from launcher.run.provenance import differences
from launcher.run.saves import run_entries
from launcher.train import build_engine
from launcher.util.errors import UserError

MODEL = ["--layers=1", "--d-model=48", "--heads=2", "--context=16"]
BYTE = ["--tokenizer=byte", "--vocab-size=257"]
SCRATCH = {
    **{"lr": 1e-3, "schedule": "cosine", "min_lr_ratio": 0.1, "warmup_steps": 0.02},
    "weight_decay": 0.1,
}
FULL = {
    **{"lr": 2e-5, "schedule": "cosine", "min_lr_ratio": 0.0, "warmup_steps": 0.03},
    "weight_decay": 0.0,
}
ADAPTERS = {
    **{"lr": 2e-4, "schedule": "constant", "min_lr_ratio": 0.0, "warmup_steps": 0.03},
    "weight_decay": 0.0,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(f"Paragraph {n} says {n * n} times little." for n in range(300)))
    return path


@pytest.fixture(autouse=True)
def cache(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDSCALE_CACHE", str(text.parent / "cache"))


def prepared(text: Path, *flags: str | Path) -> Prepared:
    argv = ["--device=cpu", "--steps=100", f"--data={text}", *map(str, flags)]
    return prepare(argv, world_size=1, ranks_per_node=1)


def saved(folder: Path, found: Prepared) -> Path:
    """Save step 3 of a run as training would."""
    engine = build_engine(found.resolved, start("cpu", timeout_s=60.0, needs_group=False))
    extra = run_entries(found.resolved, found.corpus)
    Checkpointer(folder / "checkpoints").save(3, engine, extra)
    (folder / "config.yaml").write_text(yaml.safe_dump(found.resolved.config.flat()))
    return folder


@pytest.fixture(scope="module")
def base(text: Path) -> Path:
    patch = pytest.MonkeyPatch()
    patch.setenv("SHARDSCALE_CACHE", str(text.parent / "cache"))
    found = prepared(text, *MODEL, *BYTE)
    patch.undo()
    return saved(text.parent / "base", found)


def recipe(config: RunConfig) -> dict[str, Any]:
    flat = config.flat()
    return {name: flat[name] for name in SCRATCH if name in flat}


def test_the_task_decides_and_the_console_says_its_source(base: Path, text: Path) -> None:
    cases: dict[str, tuple[list[str], dict[str, Any], str]] = {
        "training from scratch": ([*MODEL, *BYTE], SCRATCH, "karpathy/nanoGPT"),
        "full fine-tuning": ([f"--init-from={base}"], FULL, "tatsu-lab/stanford_alpaca"),
        "LoRA": ([f"--init-from={base}", "--lora-rank=2"], ADAPTERS, "arXiv:2305.14314"),
    }
    for task, (flags, expected, source) in cases.items():
        found = prepared(text, *flags)
        assert recipe(found.resolved.config) == expected
        assert found.recipe.startswith(f"recipe for {task}: lr {expected['lr']:g}, ")
        assert source in found.recipe
        assert "changed" not in found.recipe


@pytest.mark.parametrize(
    ("flags", "lr", "says"),
    [
        (["--optimizer=muon"], 2e-5, "Alpaca's, github.com/tatsu-lab/stanford_alpaca)"),
        (["--optimizer=adafactor"], 1e-3, "lr T5's for all weights, arXiv:1910.10683"),
        (["--optimizer=sgd"], 2e-5, "sgd has no usual rate for decoders, so try larger ones"),
        (["--optimizer=sgd", "--lr=0.1"], 0.1, "alpaca; changed: --lr)"),
    ],
)
def test_optimizers_of_another_scale(
    base: Path, text: Path, flags: list[str], lr: float, says: str
) -> None:
    found = prepared(text, f"--init-from={base}", *flags)
    assert found.resolved.config.optim.lr == lr
    assert says in found.recipe


def test_what_is_given_wins(base: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("weight_decay: 0.1\nwarmup_ratio: 0.5\n")
    params = {"lr": 1e-3, "weight_decay": 0.25}
    (tmp_path / "ds.json").write_text(
        json.dumps({"optimizer": {"type": "AdamW", "params": params}, "bf16": {"enabled": True}})
    )
    begins = f"--init-from={base}"
    flags = ["--lr=1e-3", "--schedule=linear", f"--config={tmp_path / 'run.yaml'}"]
    found = prepared(text, begins, *flags, "--warmup-steps=7")
    expected = {"lr": 1e-3, "schedule": "linear", "weight_decay": 0.1, "warmup_steps": 7}
    assert recipe(found.resolved.config) == FULL | expected
    changed = "changed: --lr, --schedule, --warmup-steps, --weight-decay)"
    assert found.recipe.endswith(changed)

    config = parse_run_config([begins, f"--deepspeed={tmp_path / 'ds.json'}", "--zero=1"], 1)
    resolved = resolve(config, world_size=1, device_type="cpu")
    assert recipe(resolved.config) == FULL | params


def test_a_resume_keeps_what_the_run_had(base: Path, text: Path, tmp_path: Path) -> None:
    begun = prepared(text, f"--init-from={base}", "--warmup-steps=7", "--min-lr-ratio=0.5")
    expected = recipe(begun.resolved.config)
    run = saved(tmp_path / "run", begun)
    found = prepared(text, *MODEL, *BYTE, f"--resume={run}")
    assert recipe(found.resolved.config) == expected
    assert found.recipe.startswith(
        "recipe as in the run that is resumed: lr 2e-05, cosine to 1e-05"
    )
    checkpoint = Checkpoint.open(run / "checkpoints" / "step-00000003")
    assert differences(checkpoint, found.resolved, found.corpus) == []

    low = saved(tmp_path / "low", prepared(text, *MODEL, *BYTE, "--precision=bf16"))
    found = prepared(text, *MODEL, *BYTE, f"--resume={low}")
    assert found.resolved.config.optim.precision == "bf16"  # where a CPU would begin in fp32
    assert saved_by(low)["config"]["compile"] is False
    assert saved_by(None) == {}

    found = prepared(text, *MODEL, *BYTE, f"--resume={run}", "--lr=1e-3", "--warmup-steps=0.5")
    assert recipe(found.resolved.config) == expected | {"lr": 1e-3, "warmup_steps": 0.5}
    assert differences(checkpoint, found.resolved, found.corpus) == [
        "lr 2e-05 -> 0.001",
        "warmup_steps 7.0 -> 0.5",
    ]

    found = prepared(text, f"--config={run / 'config.yaml'}")
    assert recipe(found.resolved.config) == recipe(begun.resolved.config)


def as_saved(run: Path, folder: Path, extra: dict[str, Any]) -> Path:
    """Copy a checkpoint with other entries of its run."""
    source, path = (at / "checkpoints" / "step-00000003" for at in (run, folder))
    path.mkdir(parents=True)
    for file in source.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    document = json.loads((path / "index.json").read_text())
    document["content"]["extra"] = extra
    document["sha256"] = digest(document["content"])
    (path / "index.json").write_text(json.dumps(document))
    return folder


def test_older_and_imported_checkpoints(
    base: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = base / "checkpoints" / "step-00000003" / "index.json"
    extra = json.loads(index.read_text())["content"]["extra"]
    older = {name: value for name, value in extra["config"].items() if name != "warmup_steps"}
    path = as_saved(base, tmp_path / "older", {**extra, "config": {**older, "lr": 0.5}})
    found = prepared(text, *MODEL, *BYTE, f"--resume={path}")
    assert recipe(found.resolved.config) == SCRATCH | {"lr": 0.5}
    checkpoint = Checkpoint.open(path / "checkpoints" / "step-00000003")
    assert differences(checkpoint, found.resolved, found.corpus) == []

    named = {**older, "warmup_ratio": 0.25, "sample_every_s": 0.5}
    path = as_saved(base, tmp_path / "before 0.4", {**extra, "config": named})
    found = prepared(text, *MODEL, *BYTE, f"--resume={path}")
    assert recipe(found.resolved.config) == SCRATCH | {"warmup_steps": 0.25}
    checkpoint = Checkpoint.open(path / "checkpoints" / "step-00000003")
    assert differences(checkpoint, found.resolved, found.corpus) == []
    assert capsys.readouterr().err == ""

    imported = {name: extra[name] for name in ("model", "tokenizer") if name in extra}
    path = as_saved(base, tmp_path / "imported", {**imported, "config": {}})
    found = prepared(text, *MODEL, *BYTE, f"--resume={path}")
    assert recipe(found.resolved.config) == FULL
    assert found.recipe.startswith("recipe for full fine-tuning")


def test_adapters_need_weights_beside_them(text: Path) -> None:
    flags = [*MODEL, *BYTE, "--lora-rank=2"]
    with pytest.raises(UserError, match="--lora-rank 2 without --init-from trains adapters"):
        prepared(text, *flags)
    assert prepared(text, *flags, "--random-base").resolved.model.lora is not None
    with pytest.raises(UserError, match="--random-base belongs to --lora-rank"):
        prepared(text, *MODEL, *BYTE, "--random-base")


def test_a_warm_up_is_a_fraction_of_the_schedule() -> None:
    choice = OptimChoice(lr=1.0, warmup_steps=0.29)
    assert [learning_rate(step, choice, 100) for step in (1, 28, 29)] == [1 / 29, 28 / 29, 1.0]
    assert learning_rate(1, OptimChoice(lr=1.0, warmup_steps=0.0, schedule="constant"), 9) == 1.0
    with pytest.raises(UserError, match=r"--warmup-steps 1.5 must be a whole number of steps, or"):
        OptimChoice(warmup_steps=1.5)


def test_the_optimizer_takes_the_recipe(base: Path, text: Path) -> None:
    found = prepared(text, f"--init-from={base}")
    engine = build_engine(found.resolved, start("cpu", timeout_s=60.0, needs_group=False))
    optimizers = [v for v in vars(engine).values() if isinstance(v, torch.optim.Optimizer)]
    decays = {group["weight_decay"] for optimizer in optimizers for group in optimizer.param_groups}
    assert decays == {0.0}
