"""`--compile auto` in a plan: what its command's run will do, candidate by candidate."""

import pytest

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import resolve
from launcher.config.schema import RunConfig
from launcher.forecast.candidates import choices
from launcher.forecast.cluster import find_cluster
from launcher.forecast.evaluation import Search
from launcher.forecast.fit import Room, needed_bytes
from launcher.forecast.plan_answer import command_of
from launcher.forecast.plan_cli import main, parse_options
from launcher.forecast.search import plan
from launcher.forecast.suggestions import suggest
from launcher.forecast.table import closing_lines

FLAGS = ["--layers=2", "--d-model=128", "--heads=4", "--context=64", "--vocab-size=257"]
A100 = "NVIDIA A100-SXM4-40GB"


def asked(*flags: str) -> RunConfig:
    return parse_run_config([*FLAGS, *flags])


def compiled(config: RunConfig, fixed: set[str]) -> dict[str, list[bool]]:
    found = choices(config, fixed, world_size=2, ranks_per_node=2, device_type="cuda")
    assert {run.config.loop.compile for one in found for run in one.runs} <= {True, False}
    return {
        f"{one.label} {one.precision} {one.checkpointing}": [
            bool(run.config.loop.compile) for run in one.runs
        ]
        for one in found
    }


def test_a_plan_without_steps_is_for_a_run_that_compiles_nothing() -> None:
    assert not any(any(each) for each in compiled(asked(), set()).values())


def test_candidates_of_long_runs_are_compiled_where_that_was_tested() -> None:
    found = compiled(asked("--steps=400000000"), {"steps"})
    assert found["ddp bf16 none"][-1]
    assert found["ddp bf16 full"][-1]
    for name, each in found.items():
        tested = name.split()[0] == "ddp" and "bf16" in name  # FSDP's save no time in bf16
        assert any(each) <= tested, name
    # A larger micro-batch without a global batch is more work in a step.
    some = found["ddp bf16 none"]
    assert some == sorted(some)
    assert {False, True} == set(some)


def test_a_table_names_the_candidates_that_are_compiled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for steps, named in ((10**8, ["fsdp, fsdp-grad-op"]), (10, [])):
        flags = [*FLAGS, f"--steps={steps}", "--strategy=fsdp", "--precision=fp8"]
        flags += ["--activation-checkpointing=none", "--micro-batch=128", "--global-batch=256"]
        assert main([*flags, "--gpus=2", "--gpu=H100", "--no-calibration", "--quiet"]) == 0
        lines = capsys.readouterr().out.splitlines()
        start = "compiled by --compile auto: "
        assert [line.removeprefix(start) for line in lines if line.startswith(start)] == named


def test_the_command_of_a_plan_is_the_run_that_was_planned() -> None:
    flags = [*FLAGS, "--steps=100000000", "--strategy=ddp", "--precision=fp8"]
    flags += ["--activation-checkpointing=none", "--micro-batch=128"]
    options = ["--gpus", "2", "--gpu", "H100", "--no-calibration"]
    cluster = find_cluster(parse_options(options)[0])[0]
    fixed = {"steps", "strategy", "precision", "activation_checkpointing", "micro_batch"}
    search = Search(cluster=cluster, goal="fastest", evaluate_all=False)
    found = plan(parse_run_config(flags, 2), fixed, search, progress=lambda done, total: None)
    best = found.best_first[0]
    assert best.run.config.loop.compile is True
    assert any(line.startswith("compile: on (auto: ") for line in closing_lines(found, cluster))
    words = command_of(best, flags, cluster).partition("launcher.train ")[2].split()
    run = resolve(parse_run_config(words, 2), world_size=2, device_type="cuda")
    assert run.compile_lines() == best.run.compile_lines()


def test_a_recording_that_takes_too_much_is_advised_against() -> None:
    config = parse_run_config(["--model=seed-134m", "--precision=bf16", "--strategy=single"])
    failed = resolve(config, world_size=1, device_type="cuda")
    assert failed.config.loop.cuda_graphs
    eager = resolve(config.replace(cuda_graphs=False), world_size=1, device_type="cuda")
    unlimited = Room(size_bytes=2**40, gpu=A100, capped=True)
    needed, least = (needed_bytes(run, unlimited) for run in (failed, eager))
    assert least < needed
    room = Room(size_bytes=int(least / 0.945), gpu=A100, capped=True)
    found = suggest(failed, room, ranks_per_node=1)
    assert "--no-cuda-graphs" in [one.flags for one in found]
