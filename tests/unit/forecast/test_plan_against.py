"""The end of a run: what was predicted for it, beside what it has measured."""

import dataclasses
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import harness
import pytest
import torch

from launcher.compare.report.comparison import Report
from launcher.compare.report.find import FoundRun
from launcher.compare.report.runs import load_run
from launcher.config.arguments import parse_run_config
from launcher.config.resolve import resolve
from launcher.forecast import against
from launcher.forecast.against import against_run
from launcher.measure.records import Summary
from launcher.parallel.world import World
from launcher.strategies.ledger import CATEGORIES, Ledger, LedgerLines

FLAGS = [
    *("--layers=2", "--d-model=64", "--heads=4", "--context=32", "--vocab-size=260"),
    *("--tokenizer=byte", "--device=cpu", "--micro-batch=4", "--report-to=none"),
]
WORLD = World(rank=0, local_rank=0, size=1, local_size=1, device=torch.device("cpu"))
PEAK = Ledger(
    moment="peak",
    step=3,
    device=LedgerLines(params_bytes=4_000_000, optimizer_bytes=8_000_000, used_bytes=12_000_000),
    host=LedgerLines(),
    disk=LedgerLines(),
)


def train(folder: Path, *more: str) -> "subprocess.CompletedProcess[str]":
    text = folder / "text.txt"
    text.write_text(Path(__file__).read_text() * 5)
    return harness.train(1, *FLAGS, f"--data={text}", *more)


def test_a_traced_run_ends_with_both_sides(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = train(tmp_path, "--steps=4", "--memory-trace", "--memory-limit=1GiB", f"--out={out}")
    assert done.returncode == 0, done.stderr
    *_, total, by_category = done.stdout.splitlines()
    assert re.match(r"predicted \d+\.\dMiB, measured \d+\.\dMiB \(", total)
    summary = json.loads((out / "summary.json").read_text())
    assert list(summary) == [field.name for field in dataclasses.fields(Summary)]
    plan = summary["plan"]
    assert plan["period"] == "steady"
    assert abs(plan["off"]) < 0.05
    assert f" ({plan['off']:+.1%}); peaks in MiB: " in total
    assert {"first_step", "steady"} <= plan["periods"].keys()
    for name in ("first_step", "steady"):
        both = plan["periods"][name]
        assert both["predicted"] == pytest.approx(both["measured"], rel=0.05), name
    for name in ("params", "optimizer", "activations"):
        assert plan["measured"][name] > 0
        assert plan["predicted"][name] == pytest.approx(plan["measured"][name], rel=0.05)
        assert f"{name} {plan['predicted'][name] / 2**20:,.1f} / " in by_category
    assert sum(plan["measured"].values()) == 2 * plan["measured"]["peak"]
    # The page draws it beside the measured one.
    (row,) = Report(
        [load_run("run", FoundRun(path=out))], reference=None, memory_budget_bytes=2**30
    ).data["runs"]
    moments = {entry["moment"]: entry["lines"] for entry in row["ledgers"]}
    assert moments["predicted"]["params_bytes"] == plan["predicted"]["params"]
    assert {f"{name}_bytes" for name in CATEGORIES} <= moments["predicted"].keys()


def test_a_run_that_measured_nothing_says_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = train(tmp_path, "--steps=1", f"--out={out}")
    assert done.returncode == 0, done.stderr
    assert "predicted" not in done.stdout
    summary = json.loads((out / "summary.json").read_text())
    assert "plan" not in summary
    older = Summary.of({"steps": summary["steps"], "of_another_version": 1})
    assert (older.steps, older.duration_s, older.ranks) == (summary["steps"], None, [])


def test_a_planner_that_fails_is_told_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    run = resolve(parse_run_config(FLAGS), world_size=1, device_type="cpu")

    def broken(*args: object, **more: object) -> None:
        raise KeyError("no such storage")

    monkeypatch.setattr(against, "predict", broken)
    outcome = against_run(run, WORLD, PEAK, [], peaks={}, resumed=False)
    lines, record, ledger = outcome
    assert lines == ["predicted n/a (KeyError: 'no such storage')"]
    assert record == {"reason": "KeyError: 'no such storage'"}
    assert ledger is None


def test_deepspeed_lays_weights_on_the_host_as_on_the_device_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = [flag for flag in FLAGS if flag != "--device=cpu"]
    config = parse_run_config([*flags, "--zero=2", "--precision=fp32"])
    run = resolve(config, world_size=8, device_type="cuda")
    world = dataclasses.replace(WORLD, size=8, local_size=8, device=torch.device("cuda"))
    monkeypatch.setattr(against, "_learn", lambda *of_the_run: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "of the test")
    levels = []
    for size_bytes in (2**19, 2**30):  # too little for all weights twice, and enough
        device = SimpleNamespace(total_memory=size_bytes)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, it=device: it)
        measured = {("init", "model"): 1}
        _, record, _ = against_run(run, world, PEAK, [], peaks=measured, resumed=False)
        levels.append(record["periods"]["init"]["predicted"])
    assert levels[0] < levels[1]


def test_the_first_step_is_compared_with_the_first_step() -> None:
    run = resolve(parse_run_config(FLAGS), world_size=1, device_type="cpu")
    first = dataclasses.replace(PEAK, step=1)
    for peak, resumed, period in (
        (PEAK, False, "steady"),
        (first, False, "first_step"),
        (first, True, "steady"),
    ):
        _, record, _ = against_run(run, WORLD, peak, [], peaks={}, resumed=resumed)
        assert record["period"] == period
        assert record["measured"]["peak"] == 12_000_000
