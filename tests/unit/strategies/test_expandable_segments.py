"""Expandable segments of CUDA's allocator: when a run has them, and that its plan knows."""

import os
import subprocess
import sys

import pytest

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import Resolved, resolve
from launcher.forecast.fit import Room, needed_bytes, verdict
from launcher.forecast.plan_cli import main

A100 = "NVIDIA A100-SXM4-40GB"
CUDA, GENERAL = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
OFF = "expandable_segments:False"
# Without a GPU `start` ends at the GPU's choice, behind the allocator's settings.
STARTED = """
import contextlib, sys, torch
from launcher.parallel.world import start

with contextlib.suppress(Exception):
    start(sys.argv[1], timeout_s=60, needs_group=False, expandable_segments=sys.argv[2] == "on")
print(torch._C._accelerator_getAllocatorSettings())
"""


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CUDA, "PYTORCH_HIP_ALLOC_CONF", GENERAL):
        monkeypatch.delenv(name, raising=False)


def resolved(*flags: str, device_type: str = "cuda") -> Resolved:
    model = "--layers=4 --d-model=512 --heads=8 --context=256 --vocab-size=4096 --micro-batch=16"
    return resolve(
        parse_run_config([*model.split(), *flags]), world_size=1, device_type=device_type
    )


@pytest.mark.parametrize(
    ("device", "asked", "variables", "expected"),
    [
        ("cuda", "on", {}, "expandable_segments:True"),
        ("cuda", "off", {}, ""),
        ("cuda", "on", {GENERAL: "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ("cuda", "on", {CUDA: "expandable_segments:False"}, "expandable_segments:False"),
        ("cuda", "off", {GENERAL: "expandable_segments:True"}, "expandable_segments:True"),
        ("cpu", "on", {}, ""),
    ],
)
def test_torch_has_the_settings_of_the_flag_or_of_the_user(
    device: str, asked: str, variables: dict[str, str], expected: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", STARTED, device, asked],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, True),
        ({CUDA: "expandable_segments:True"}, True),
        ({GENERAL: "max_split_size_mb:64, expandable_segments : True"}, True),
        ({GENERAL: "expandable_segments:False"}, False),
        ({GENERAL: "max_split_size_mb:64"}, False),
        ({GENERAL: ""}, False),
        ({CUDA: "max_split_size_mb:64", GENERAL: "expandable_segments:True"}, False),
    ],
)
def test_a_resolved_run_says_what_it_has(
    variables: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert resolved().expandable_segments is expected
    assert not resolved(device_type="cpu").expandable_segments


def test_a_run_needs_less_where_segments_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    anywhere = Room(size_bytes=2**40, gpu=A100, capped=True)
    growing = needed_bytes(resolved(), anywhere)
    monkeypatch.setenv(GENERAL, OFF)
    fixed = needed_bytes(resolved(), anywhere)
    assert growing < 0.98 * fixed
    between = (growing + fixed) // 2
    room = Room(size_bytes=between, gpu=A100, capped=True)
    assert verdict(needed_bytes(resolved(), room), between) == "does not fit"
    monkeypatch.delenv(GENERAL)
    assert verdict(needed_bytes(resolved(), room), between) != "does not fit"


def test_a_plan_follows_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = "--model nano --gpu A100-40GB --gpus 2 --strategy fsdp --micro-batch 8 --precision bf16"
    flags += " --activation-checkpointing none --quiet"
    assert main(flags.split()) == 0
    growing = capsys.readouterr().out
    monkeypatch.setenv(GENERAL, OFF)
    assert main(flags.split()) == 0
    fixed = capsys.readouterr().out
    assert "that CUDA's allocator keeps" in " ".join(growing.split())
    assert "without expandable segments" not in growing
    assert "(without expandable segments)" in " ".join(fixed.split())
