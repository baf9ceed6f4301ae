"""What the planner remembers of runs: medians of the last ones, and nothing of a damaged file."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.config.arguments import parse_run_config
from launcher.forecast.assess import tokens_per_s
from launcher.forecast.bounds import most_tokens_per_s
from launcher.forecast.calibration import KEPT, Calibration
from launcher.forecast.candidates import choices, given_fields
from launcher.forecast.cluster import find_cluster
from launcher.forecast.plan_cli import parse_options
from launcher.measure.hardware import NULL_GPUS

A100 = "A100-SXM4-40GB"
MIB = 2**20


def test_the_median_of_the_last_runs_counts(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "calibration.json"
    assert Calibration.load(path).fixed_bytes(A100, grouped=False) is None
    for number in range(KEPT + 5):
        calibration = Calibration.load(path)
        calibration.learn_fixed_bytes(A100, grouped=False, size_bytes=(500 + number) * MIB)
        calibration.learn_fixed_bytes(A100, grouped=True, size_bytes=1200 * MIB)
        calibration.learn_time(A100, "bf16", "zero2", ratio=1.12)
        calibration.save()
    learnt = Calibration.load(path)
    assert learnt.fixed_bytes(A100, grouped=False) == (505 + 524) * MIB / 2
    assert learnt.fixed_bytes(A100, grouped=True) == 1200 * MIB
    assert learnt.fixed_bytes("H100", grouped=True) is None
    assert learnt.time_ratio(A100, "bf16", "zero2") == 1.12
    assert learnt.time_ratio(A100, "bf16", "zero3") is None
    lines = learnt.describe(A100, grouped=True)
    assert [line.split(" here: ")[1] for line in lines] == [
        "context + NCCL 1.17GiB",
        "time x1.12 for zero2 in bf16",
    ]
    assert all(line.startswith(f"from {KEPT} runs (last 20") for line in lines)
    assert learnt.describe("H100", grouped=True) == []
    assert [file.name for file in path.parent.iterdir()] == ["calibration.json"]


def test_what_says_nothing_of_the_machine_is_not_learnt(tmp_path: Path) -> None:
    calibration = Calibration.load(tmp_path / "calibration.json")
    calibration.learn_fixed_bytes(A100, grouped=False, size_bytes=-5)
    calibration.learn_time(A100, "bf16", "ddp", ratio=900.0)
    assert calibration.fixed_bytes(A100, grouped=False) is None
    assert calibration.time_ratio(A100, "bf16", "ddp") is None


def test_a_rehearsal_teaches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NULL_GPUS, "NVIDIA H200,150000000000,545259520,9,0,132,1")
    calibration = Calibration.load(tmp_path / "calibration.json")
    calibration.learn_fixed_bytes(A100, grouped=False, size_bytes=500 * MIB)
    calibration.learn_time(A100, "bf16", "ddp", ratio=0.22)
    assert calibration.fixed_bytes(A100, grouped=False) is None
    assert calibration.time_ratio(A100, "bf16", "ddp") is None


def test_constants_that_rehearsals_may_have_taught_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(
        '{"schema_version": 1, "constants": {"time/A/bf16/ddp": {"values": [0.22], "last": ""}}}'
    )
    assert Calibration.load(path).time_ratio("A", "bf16", "ddp") is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[1, 2]",
        '{"schema_version": 99, "constants": {}}',
        '{"schema_version": 2, "constants": 7}',
        '{"schema_version": 2, "constants": {"time/A/bf16/ddp": null}}',
        '{"schema_version": 2, "constants": {"time/A/bf16/ddp": {"values": []}}}',
        '{"schema_version": 2, "constants": {"time/A/bf16/ddp": {"values": ["x", 1]}}}',
        '{"schema_version": 2, "constants": {"time/A/bf16/ddp": {"values": [true]}}}',
        '{"schema_version": 2, "constants": {"time/A/bf16/ddp": {"values": [NaN]}}}',
        '{"schema_version": 2, "constants": {"time/A": {"values": [1.0]}}}',
        '{"schema_version": 2, "constants": {"time/A/bf16": {"values": [1.0]}}}',
    ],
)
def test_a_damaged_file_teaches_nothing_and_is_replaced(tmp_path: Path, content: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(content)
    calibration = Calibration.load(path)
    assert calibration.time_ratio("A", "bf16", "ddp") is None
    assert calibration.describe("A", grouped=False) == []
    calibration.learn_time("A", "bf16", "ddp", ratio=1.5)
    calibration.save()
    assert Calibration.load(path).time_ratio("A", "bf16", "ddp") == 1.5
    assert json.loads(path.read_text())["schema_version"] == 2


def test_no_speed_is_above_the_bound_by_which_candidates_are_left_out(tmp_path: Path) -> None:
    """Runs that took less time than predicted raise both."""
    flags = "--model gpt2 --layers 2 --strategy ddp --precision bf16 --micro-batch 8"
    flags += " --activation-checkpointing none"
    config = parse_run_config(flags.split())
    fixed = given_fields(flags.split(), config)
    (choice,) = choices(config, fixed, world_size=2, ranks_per_node=2, device_type="cuda")
    options = ["--gpus", "2", "--gpu", "A100-40GB", "--no-calibration"]
    cluster, _ = find_cluster(parse_options(options)[0])
    calibration = Calibration.load(tmp_path / "calibration.json")
    calibration.learn_time(A100, "bf16", "ddp", ratio=0.22)
    learnt = replace(cluster, calibration=calibration)
    assert tokens_per_s(choice.runs[0], learnt) > most_tokens_per_s(choice, cluster)
    assert tokens_per_s(choice.runs[0], learnt) < most_tokens_per_s(choice, learnt)
