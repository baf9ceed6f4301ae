"""`--compile auto`: off on a CPU, and on a GPU unless it was tested and pays for so many steps."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_architectures import ARCHITECTURES

from launcher.config.compile_choice import COMPILE_S, SAVED_BYTES_DECODERS
from launcher.config.resolve import Resolved, resolve
from launcher.config.rules import compute
from launcher.config.schema import RunConfig
from launcher.util.errors import UserError

LLAMA: dict[str, Any] = {"position": "rope", "norm": "rms", "activation": "swiglu"}
LARGE: dict[str, Any] = {"model": "seed-134m", "micro_batch": 125, "steps": 10**6}


def resolved(device: str = "cuda", before: bool | None = None, **changes: Any) -> Resolved:
    config = RunConfig().replace(**LARGE | changes)
    # Its libraries may be missing here.
    return resolve(config, world_size=2, device_type=device, elsewhere=True, compiled_before=before)


def of_transformers(folder: Path, name: str, **changes: Any) -> Resolved:
    (folder / "config.json").write_text(json.dumps(ARCHITECTURES[name]))
    sizes = {"model": str(folder), "micro_batch": 125, "steps": 10**7, "strategy": "ddp"}
    config = RunConfig().replace(**sizes | changes)
    return resolve(config, world_size=2, device_type="cuda", elsewhere=True)


def test_on_a_cpu_nothing_is_compiled_and_nothing_said() -> None:
    run = resolved("cpu")
    assert run.config.loop.compile is False
    assert run.compile_lines() == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("asked", [True, False])
def test_what_is_asked_for_is_what_is_done(device: str, asked: bool) -> None:
    run = resolved(device, before=not asked, compile=asked)
    assert run.config.loop.compile is asked
    assert run.compile_lines() == []


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [("ddp", "auto"), ("ddp", "bf16"), ("ddp", "fp8"), ("fsdp", "fp8")],
)
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_long_run_of_what_was_tested_is_compiled(
    strategy: str, precision: str, mode: str
) -> None:
    run = resolved(strategy=strategy, precision=precision, activation_checkpointing=mode)
    assert run.config.loop.compile is True
    (line,) = run.compile_lines()
    assert line.startswith("compile: on (auto: saves about ")
    assert f"in 1,000,000 steps, and compiling takes about {COMPILE_S:.0f} s)" in line


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"strategy": "zero", "zero": 2}, "--zero 2"),
        ({"precision": "fp32"}, "--precision fp32"),
        ({"precision": "bf16-pure", "betas": (0.9, 0.99)}, "--precision bf16-pure"),
        ({"activation_checkpointing": "offload"}, "--activation-checkpointing offload"),
        ({"activation_checkpointing": "every=2"}, "--activation-checkpointing every=2"),
        ({"attention": "flex"}, "--attention flex"),
        ({"window": 64}, "--window 64"),
        ({"dropout": 0.1}, "--dropout 0.1"),
        ({"lora_rank": 8, "random_base": True}, "--lora-rank 8"),
        ({"document_attention": True}, "--document-attention"),
        ({"strategy": "fsdp", "offload_param": "cpu"}, "--offload-param cpu"),
        ({"tensor_parallel": 2}, "--tensor-parallel 2"),
        ({"context_parallel": 2}, "--context-parallel 2"),
        ({"strategy": "fsdp", "optimizer_in_backward": True, "clip": 0}, "--optimizer-in-backward"),
        ({"memory_trace": True}, "--memory-trace"),
        ({"mlp_tile": 64}, "--mlp-tile 64"),
    ],
)
def test_what_was_not_tested_is_not_compiled(changes: dict[str, Any], reason: str) -> None:
    for before in (None, True):
        run = resolved(before=before, **changes)
        assert run.config.loop.compile is False
        assert run.compile_lines() == [f"compile: off (auto: not tested with {reason})"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"steps": 300}, "in 300 steps, and compiling takes about"),
        ({"steps": None}, "in 300 steps, and compiling takes about"),
        ({"stop_after": 10}, "in 10 steps, and compiling takes about"),
        (
            {"layers": 1, "d_model": 96, "micro_batch": 1},
            "in 1,000,000 steps, and compiling takes about",
        ),
        ({"steps": None, "epochs": 100.0}, "--epochs leaves the number of steps open"),
        ({"max_minutes": 10.0}, "--max-minutes leaves the number of steps open"),
    ],
)
def test_a_short_run_is_not_compiled(changes: dict[str, Any], reason: str) -> None:
    run = resolved(**changes)
    assert run.config.loop.compile is False
    (line,) = run.compile_lines()
    assert line.startswith("compile: off (auto: ")
    assert reason in line


def test_steps_from_which_it_pays() -> None:
    # Steps at which it pays, in thousands.
    pays: list[tuple[dict[str, Any], float]] = [
        ({"strategy": "ddp"}, 48.6),
        ({"strategy": "fsdp", "precision": "fp8"}, 0.307),
    ]
    for changes, least in pays:
        for steps, compiled in ((int(950 * least), False), (int(1050 * least), True)):
            run = resolved(steps=steps, **changes)
            assert run.config.loop.compile is compiled, (changes, steps)
    whole = resolved(micro_batch=64, global_batch=128, steps=9000)
    accumulated = resolved(micro_batch=2, global_batch=128, steps=9000)
    assert whole.compile_reason == accumulated.compile_reason
    more = resolved(micro_batch=64, global_batch=1280, steps=900)
    assert more.compile_reason == whole.compile_reason.replace("9,000", "900")


def test_blocks_that_are_as_fast_without_are_not_compiled() -> None:
    for steps in (300, 10**7):
        run = resolved(**LLAMA, steps=steps)
        assert run.config.loop.compile is False
        assert run.compile_lines() == ["compile: off (auto: saves no time)"]
    assert resolved(strategy="fsdp").compile_lines() == ["compile: off (auto: saves no time)"]
    assert resolved(**LLAMA, precision="fp8").config.loop.compile is True
    assert resolved(**LLAMA, before=True).config.loop.compile is True


def test_blocks_of_which_nothing_was_measured_are_not_compiled() -> None:
    other: dict[str, Any] = {"position": "rope", "norm": "layer", "activation": "swiglu"}
    for changes in ({}, {"steps": 300}, {"epochs": 1.0, "steps": None}):
        run = resolved(**other | changes)
        (line,) = run.compile_lines()
        assert "what it gains is measured for blocks of GPT-2 and Llama, and in fp8" in line
        assert run.config.loop.compile is False
    assert resolved(**other, precision="fp8").config.loop.compile is True
    assert resolved(**other, before=True).config.loop.compile is True


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_decoders_of_transformers_that_were_measured_are_compiled(
    strategy: str, tmp_path: Path
) -> None:
    for name in SAVED_BYTES_DECODERS:
        for steps, compiled in ((10**7, True), (300, False)):
            run = of_transformers(tmp_path, name, strategy=strategy, steps=steps)
            assert run.config.loop.compile is compiled, (name, run.compile_reason)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("mixtral", {}, "this decoder of transformers"),
        ("olmo2", {"precision": "fp8"}, "--precision fp8 and a decoder of transformers"),
        (
            "olmo2",
            {"activation_checkpointing": "full"},
            "--activation-checkpointing full and a decoder of transformers",
        ),
    ],
)
def test_other_decoders_of_transformers_are_not(
    name: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    run = of_transformers(tmp_path, name, **changes)
    assert run.compile_lines() == [f"compile: off (auto: not tested with {reason})"]


@pytest.mark.parametrize("before", [True, False])
def test_a_resume_keeps_what_the_run_had(before: bool) -> None:
    run = resolved(before=before, steps=10**5 if not before else 300)
    assert run.config.loop.compile is before
    (line,) = run.compile_lines()
    assert line == f"compile: {'on' if before else 'off'} (auto: as in the run that is resumed)"
    assert resolved("cpu", before=before).config.loop.compile is False


def test_what_an_older_torch_computes_wrong_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "version_of", lambda package: "2.11.0")
    with pytest.raises(UserError, match=r"--tensor-parallel: torch 2\.11\.0 computes wrong"):
        resolved("cpu", model="nano", micro_batch=8, compile=True, tensor_parallel=2)
    monkeypatch.setattr(compute, "version_of", lambda package: "2.13.0")
    assert resolved("cpu", model="nano", micro_batch=8, compile=True, tensor_parallel=2)
