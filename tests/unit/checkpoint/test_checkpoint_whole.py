"""A checkpoint that lacks a part of its optimizer's state gets no name, and is passed over."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from launcher.checkpoint import Checkpoint, Checkpointer, DamagedCheckpoint, SaveError
from launcher.checkpoint.document import digest as _digest
from launcher.config.resolve import resolve
from launcher.config.schema import RunConfig
from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT
from launcher.optim.registry import OPTIMIZERS, build_optimizer
from launcher.run.capacity import checkpoint_bytes
from launcher.strategies.native import NativeEngine

MODEL: dict[str, Any] = {"vocab_size": 50, "context": 8, "layers": 1, "heads": 2, "d_model": 16}
CHOICES: dict[str, dict[str, Any]] = {
    **{name: {"optimizer": name} for name in OPTIMIZERS},
    "apollo": {"optimizer": "apollo", "apollo_rank": 8},
    "sgd without momentum": {"optimizer": "sgd", "momentum": 0.0},
}


def new_engine(config: RunConfig, kind: type[NativeEngine] = NativeEngine) -> NativeEngine:
    torch.manual_seed(0)
    module: nn.Module = GPT(ModelConfig(**MODEL))
    optimizer = build_optimizer(module, config.optim)
    return kind(module, optimizer, accumulation=1, clip=0.0, device=torch.device("cpu"))


def extra(config: RunConfig) -> dict[str, Any]:
    return {"config": config.replace(**MODEL).flat()}


@pytest.mark.parametrize("name", CHOICES)
def test_a_whole_one_is_saved_and_loaded(tmp_path: Path, name: str) -> None:
    config = RunConfig().replace(**CHOICES[name])
    assert Checkpointer(tmp_path).save(1, new_engine(config), extra(config)) is not None
    Checkpointer(tmp_path).load(tmp_path, new_engine(config))


@pytest.mark.parametrize("name", CHOICES)
def test_its_size_is_known_before_the_run(tmp_path: Path, name: str) -> None:
    config = RunConfig().replace(**CHOICES[name])
    saved = Checkpointer(tmp_path).save(1, new_engine(config), extra(config))
    assert saved is not None
    files = Checkpoint.open(saved.path).files
    shape = {**MODEL, "seq_len": 8, "micro_batch": 1}
    resolved = resolve(config.replace(**shape), world_size=1, device_type="cpu")
    assert checkpoint_bytes(resolved) == sum(f.size_bytes - f.header_bytes for f in files)


class Gathered(NativeEngine):
    """An engine like FSDP2 after an evaluation: one parameter that the optimizer never saw."""

    def training_state(self) -> Any:
        state: Any = super().training_state()
        state._kinds["wte.weight"] = []
        state.own_shapes = {kind: state._shapes_of(kind) for kind in state.kinds[1:]}
        return state


class Uncounted(NativeEngine):
    """Read so that the first parameter has no counters."""

    def training_state(self) -> Any:
        state: Any = super().training_state()
        state.counters = dict
        return state


DEFECTS: dict[str, tuple[type[NativeEngine], dict[str, Any], str]] = {
    "one parameter's moments": (Gathered, {}, "has no exp_avg of wte.weight"),
    "one parameter's factors": (
        Gathered,
        {"optimizer": "adafactor"},
        "has no row_var of wte.weight",
    ),
    "all moments": (NativeEngine, {"optimizer": "sgd", "momentum": 0.0}, "has no exp_avg of"),
    "counters": (Uncounted, {}, "has no counter step of the optimizer"),
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("defect", DEFECTS)
def test_what_is_not_whole_is_not_published(
    tmp_path: Path, defect: str, asynchronous: bool
) -> None:
    kind, changes, what = DEFECTS[defect]
    config = RunConfig().replace(**changes)
    said = RunConfig() if "momentum" in changes else config
    checkpointer = Checkpointer(tmp_path, keep=1, asynchronous=asynchronous)
    checkpointer.save(1, new_engine(said), extra(said))
    checkpointer.wait()
    checkpointer = Checkpointer(tmp_path, keep=1, asynchronous=asynchronous)

    def save() -> None:
        checkpointer.save(2, new_engine(config, kind), extra(said))
        checkpointer.wait()

    with pytest.raises(SaveError, match=rf"step 2 could not be saved: the training state {what}"):
        save()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]
    _, passed_over = Checkpointer(tmp_path).load(tmp_path, new_engine(said))
    assert passed_over == []


@pytest.mark.parametrize("defect", DEFECTS)
def test_one_of_an_earlier_version_is_passed_over(tmp_path: Path, defect: str) -> None:
    """Saved without saying what it must hold, as nothing checked it then."""
    kind, changes, what = DEFECTS[defect]
    config = RunConfig().replace(**changes)
    said = RunConfig() if "momentum" in changes else config
    Checkpointer(tmp_path).save(1, new_engine(said), extra(said))
    Checkpointer(tmp_path).save(2, new_engine(config, kind), {})
    index = tmp_path / "step-00000002" / "index.json"
    document = json.loads(index.read_text())
    document["content"]["extra"] = extra(said)
    document["sha256"] = _digest(document["content"])
    index.write_text(json.dumps(document))
    loaded, passed_over = Checkpointer(tmp_path).load(tmp_path, new_engine(said))
    assert loaded.step == 1
    (reason,) = passed_over
    assert what in reason
    with pytest.raises(DamagedCheckpoint, match=what):
        Checkpointer(tmp_path).load(index.parent, new_engine(said))
