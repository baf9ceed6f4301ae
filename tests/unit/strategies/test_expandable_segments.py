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
OFF = "--no-expandable-segments"
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
    ("variables", "with_flag_on", "with_flag_off"),
    [
        ({}, True, False),
        ({CUDA: "expandable_segments:True"}, True, True),
        ({GENERAL: "max_split_size_mb:64, expandable_segments : True"}, True, True),
        ({GENERAL: "expandable_segments:False"}, False, False),
        ({GENERAL: "max_split_size_mb:64"}, False, False),
        ({GENERAL: ""}, False, False),
        ({CUDA: "max_split_size_mb:64", GENERAL: "expandable_segments:True"}, False, False),
    ],
)
def test_the_config_of_a_run_says_what_it_has(
    variables: dict[str, str],
    with_flag_on: bool,
    with_flag_off: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for flags, on_gpu in (([], with_flag_on), ([OFF], with_flag_off)):
        on_cpu = not flags  # a CPU has no such allocator: what is asked for stays
        assert resolved(*flags).config.loop.expandable_segments is on_gpu
        assert resolved(*flags, device_type="cpu").config.loop.expandable_segments is on_cpu


def test_a_run_needs_less_where_segments_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    anywhere = Room(size_bytes=2**40, gpu=A100, capped=True)
    growing = needed_bytes(resolved(), anywhere, world_size=1)
    fixed = needed_bytes(resolved(OFF), anywhere, world_size=1)
    assert growing < 0.98 * fixed
    between = (growing + fixed) // 2
    room = Room(size_bytes=between, gpu=A100, capped=True)
    assert verdict(needed_bytes(resolved(), room, world_size=1), between) != "does not fit"
    assert verdict(needed_bytes(resolved(OFF), room, world_size=1), between) == "does not fit"
    monkeypatch.setenv(GENERAL, "expandable_segments:False")
    assert needed_bytes(resolved(), anywhere, world_size=1) == fixed


def test_a_plan_follows_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--model nano --gpu A100-40GB --gpus 2 --strategy fsdp --micro-batch 8 --precision bf16"
    flags += " --activation-checkpointing none --quiet"
    assert main(flags.split()) == 0
    growing = capsys.readouterr().out
    assert main([*flags.split(), OFF]) == 0
    fixed = capsys.readouterr().out
    assert "blocks that CUDA's allocator keeps" in growing
    assert "without expandable segments" not in growing
    assert "(without expandable segments)" in " ".join(fixed.split())
    assert f" {OFF}" in fixed
