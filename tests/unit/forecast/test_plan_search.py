"""Which choices a search tries, and that what it leaves out would not have been shown."""

import shlex
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import resolve
from launcher.forecast.allocator import replay
from launcher.forecast.assess import Assessment, MicroBatches, assess
from launcher.forecast.candidates import Choice, choices, given_fields, run_of
from launcher.forecast.cluster import Cluster, find_cluster
from launcher.forecast.evaluation import Search
from launcher.forecast.fit import verdict
from launcher.forecast.plan_cli import main, parse_options
from launcher.forecast.predict import least_bytes, predict
from launcher.forecast.search import SearchResult, plan
from launcher.forecast.table import best_of_each
from launcher.forecast.timeline import Events
from launcher.forecast.trace.allocation_summaries import AllocationSummary
from launcher.torchrun import split_command
from launcher.util.errors import ExitCode, UserError


def silent(done: int, total: int) -> None:
    pass


def tried(*flags: str, gpus: int) -> list[Choice]:
    config = parse_run_config(flags)
    given = given_fields(flags, config)
    return choices(config, given, world_size=gpus, ranks_per_node=8, device_type="cuda")


def searched(flags: list[str], cluster: Cluster, goal: str, *, evaluate_all: bool) -> SearchResult:
    config = parse_run_config(flags)
    search = Search(cluster=cluster, goal=goal, evaluate_all=evaluate_all)
    return plan(config, given_fields(flags, config), search, progress=silent)


def cluster_of(*options: str) -> Cluster:
    return find_cluster(parse_options([*options, "--no-calibration"])[0])[0]


@pytest.mark.parametrize("memory", ["1280MiB", "2GiB", "24GiB"], ids=["nothing", "few", "all"])
def test_what_is_left_out_would_not_have_been_shown(memory: str) -> None:
    flags = ["--model", "gpt2", "--layers", "2", "--global-batch", "16", "--seq-len", "256"]
    cluster = cluster_of("--gpus", "4", "--gpu", "A100-40GB", "--gpu-memory", memory)
    some, all_of_them = (searched(flags, cluster, "fastest", evaluate_all=e) for e in (False, True))

    def shown(found: SearchResult) -> list[tuple[str, str, str, int, int, str]]:
        return [
            (
                *(a.choice.label, a.choice.precision, a.choice.checkpointing),
                *(a.run.config.data.micro_batch, a.used_bytes, a.verdict),
            )
            for a in best_of_each(found.best_first)
        ]

    assert shown(some) == shown(all_of_them)
    assert some.choices == all_of_them.choices == len(all_of_them.best_first)
    fits = [a.verdict == "fits" for a in all_of_them.best_first]
    assert len(some.best_first) < some.choices or not any(fits)


def test_one_gpu_tries_what_offloads() -> None:
    labels = {choice.label for choice in tried("--model=gpt2", "--global-batch=8", gpus=1)}
    assert labels == {"single", "fsdp+cpu", *(f"zero{n}+cpu" for n in (1, 2, 3)), "zero3+cpu+param"}


@pytest.mark.parametrize(
    ("flag", "labels"),
    [
        ("--zero=3", {"zero3", "zero3+cpu", "zero3+cpu+param"}),
        ("--strategy=fsdp", {"fsdp", "fsdp+each", "fsdp+cpu", "fsdp-grad-op", "fsdp-grad-op+each"}),
        ("--strategy=single", {"single"}),
    ],
)
def test_one_gpu_takes_the_strategy_that_is_asked_for(flag: str, labels: set[str]) -> None:
    found = tried("--model=gpt2", "--global-batch=8", flag, gpus=1)
    assert {choice.label for choice in found} == labels


@pytest.mark.parametrize("kernel", ["flash", "flex"])
def test_a_kernel_that_is_not_installed_here_is_planned(kernel: str) -> None:
    """It may be installed where the run is to be; torch's fused attention holds as much."""
    flags = ["--model=gpt2", "--layers=2", "--global-batch=4", "--strategy=fsdp"]
    flags += ["--precision=bf16", "--activation-checkpointing=none", "--micro-batch=2"]
    used = [
        predict(
            tried(*flags, f"--attention={each}", gpus=2)[0].runs[0],
        ).peak_bytes
        for each in (kernel, "sdpa")
    ]
    assert used[0] == used[1]


def test_stage_2_lays_weights_end_to_end_on_the_host_where_there_is_no_room_for_them_twice() -> (
    None
):
    """DeepSpeed asks what is free; before, 13b with offload was said to need its weights twice."""
    flags = "--model gpt2-xl --zero 2 --offload-optimizer cpu --precision bf16 --seq-len 64 "
    flags += "--activation-checkpointing full --micro-batch 1"
    run = resolve(parse_run_config(flags.split()), world_size=8, device_type="cuda")
    weights = 2 * run.model.parameter_count
    ample, scarce = (
        predict(run, memory_bytes=size) for size in (int(2.1 * weights), int(1.9 * weights))
    )
    init = [found.peaks["init", "build"] for found in (ample, scarce)]
    assert init[0] > 1.9 * weights > 1.4 * weights > init[1] > weights
    assert ample.peaks["steady", "backward"] == scarce.peaks["steady", "backward"]


def largest_batch(flags: list[str], memory: str) -> Assessment:
    cluster = cluster_of("--gpus", "1", "--gpu-memory", memory)
    return searched(flags, cluster, "largest-batch", evaluate_all=False).best_first[0]


def test_the_largest_batch_is_as_large_as_fits() -> None:
    flags = "--model nano --layers 1 --seq-len 16 --precision bf16 --strategy single "
    flags += "--activation-checkpointing none"
    best = largest_batch(flags.split(), "2GiB")
    size = best.run.config.data.micro_batch
    assert size == best.largest_micro_batch
    assert size > 128
    assert best.used_bytes <= best.memory_bytes
    assert best.used_bytes * 1.03 > 0.95 * best.memory_bytes  # tight is not recommended


def test_a_size_that_fits_by_its_live_bytes_alone_gives_way_to_one_that_fits() -> None:
    """At 8 sequences the allocator would keep 6 GiB of what the start has freed."""
    flags = "--model llama-3.1-8b --precision bf16 --seq-len 4096 --global-batch 64 --zero 3"
    flags += " --offload-optimizer cpu --offload-param cpu"
    cluster = cluster_of("--gpus", "1", "--gpu", "RTX-4090")
    best = searched(flags.split(), cluster, "fastest", evaluate_all=False).best_first[0]
    assert (best.verdict, best.run.config.data.micro_batch) == ("fits", 4)


def test_a_budget_of_activations_bounds_the_largest_batch() -> None:
    """Before, doubling beyond it was taken for a fault of the planner."""
    flags = "--model nano --layers 2 --seq-len 32 --precision bf16 --strategy single "
    flags += "--activation-checkpointing budget=8MiB"
    size = largest_batch(flags.split(), "8GiB").largest_micro_batch
    assert size is not None
    assert size > 128
    config = parse_run_config(flags.split())
    run_of(config, size, 1, "cuda")
    with pytest.raises(UserError, match="recompute everything keep"):
        run_of(config, size + 2 + size // 100, 1, "cuda")


def test_a_global_batch_bounds_the_micro_batch_and_nothing_else() -> None:
    (choice,) = tried(
        *("--model=nano", "--precision=bf16", "--activation-checkpointing=none"),
        *("--global-batch=512", "--strategy=single"),
        gpus=1,
    )
    assert [run.config.data.micro_batch for run in choice.runs][-2:] == [256, 512]
    assert choice.unbounded is None


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ("--optimizer-in-backward --clip 0 --global-batch 12", [12]),
        ("--precision fp8 --context 1000 --global-batch 12", [2, 4, 6, 12]),
    ],
)
def test_micro_batches_that_a_flag_rules_out_leave_the_others(flags: str, sizes: list[int]) -> None:
    """It cannot accumulate, or multiplies tokens in tiles."""
    for choice in tried("--model=nano", "--strategy=single", *flags.split(), gpus=1):
        assert [run.config.data.micro_batch for run in choice.runs] == sizes


def test_the_command_of_the_largest_model_trains_it(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--gpus 1 --gpu-memory 8GiB --goal largest-model --quiet --strategy single"
    assert main([*options.split(), "--micro-batch", "1", "--seq-len", "128"]) == 0
    shown = capsys.readouterr().out
    command = next(line for line in shown.splitlines() if line.startswith("  torchrun"))
    config = parse_run_config(split_command(shlex.split(command)[1:])[2])
    resolve(config, world_size=1, device_type="cuda")
    assert shown.startswith(f"{config.model.model}: ")
    assert config.model.build().parameter_count > 300e6


def test_events_that_were_summed_up_come_back_one_by_one() -> None:
    """The single events that an allocator replays have the peak that the sums have."""
    flags = "--model gpt2 --layers 3 --zero 3 --precision bf16 --global-batch 8 --micro-batch 2"
    run = resolve(parse_run_config(flags.split()), world_size=2, device_type="cuda")
    found = predict(run)
    use = replay(found.events, found.streams, limit_bytes=None, expandable_segments=True)
    assert use.peak_allocated_bytes == found.peak_bytes
    alive: dict[int, int] = {}
    for number, size_bytes in found.events:
        if size_bytes:
            assert number not in alive
            alive[number] = size_bytes
        elif number >= 0:
            del alive[number]
    assert len(alive) > 0
    assert isinstance(found.events, Events)
    assert any(isinstance(entry, AllocationSummary) for entry in found.events._log)


def test_a_micro_batch_that_leaves_nothing_to_accumulate_may_be_the_only_one_that_fits() -> None:
    flags = ["--model", "gpt2", "--layers", "4", "--global-batch", "32", "--seq-len", "32"]
    options = ["--gpus", "8", "--gpu", "A100-40GB"]
    [choice] = (
        choice
        for choice in tried(*flags, gpus=8)
        if choice.label == "fsdp-grad-op" and choice.precision == "bf16"
        if choice.checkpointing == "full"
    )
    needed = [assess(replace(choice, runs=(run,)), cluster_of(*options)) for run in choice.runs]
    assert [run.accumulation for run in choice.runs] == [4, 2, 1]
    assert needed[2].used_bytes < needed[0].used_bytes <= needed[1].used_bytes
    # Nearer to the least: with half of the difference an allocator makes room for the others.
    between = (3 * needed[2].used_bytes + needed[0].used_bytes) // 4
    found = assess(choice, replace(cluster_of(*options), memory_bytes=between))
    assert found.verdict != "does not fit"
    assert found.run.config.data.micro_batch == found.largest_micro_batch == 4


def test_a_choice_that_two_ways_come_to_is_there_once() -> None:
    flags = ["--zero", "3", "--offload-optimizer", "cpu", "--model", "gpt2", "--precision", "bf16"]
    found = tried(*flags, "--activation-checkpointing", "none", gpus=4)
    assert [choice.label for choice in found] == ["zero3+cpu", "zero3+cpu+param"]


@pytest.mark.parametrize("flags", ["--model gpt2", "--model gpt2 --tensor-parallel 2"])
def test_states_are_never_more_than_the_highest_moment(flags: str) -> None:
    ways = {choice.label: choice for choice in tried(*flags.split(), gpus=4)}
    for choice in ways.values():
        run = choice.runs[0]
        least = least_bytes(run)
        predicted = predict(run)
        assert least <= predicted.peak_bytes, choice.label
        assert 0 < predicted.micro_batch_bytes <= predicted.peaks["steady", "backward"]
        assert least > 0 or "+cpu" in choice.label


def test_of_what_states_alone_prevent_only_the_leanest_is_assessed() -> None:
    flags = ["--model", "gpt2", "--global-batch", "16", "--seq-len", "256"]
    cluster = cluster_of("--gpus", "4", "--gpu", "A100-40GB", "--gpu-memory", "2GiB")
    found = searched([*flags, "--strategy", "ddp"], cluster, "fastest", evaluate_all=False)
    assert found.choices == 6
    assert {a.choice.checkpointing for a in found.best_first} == {"full"}


def test_a_choice_that_fails_is_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail_on_ddp(choice: Choice, cluster: Cluster, **options: Any) -> Assessment:
        if choice.label == "ddp":
            raise AssertionError("no such size")
        return assess(choice, cluster, **options)

    monkeypatch.setattr("launcher.forecast.evaluation.assess", fail_on_ddp)
    flags = ["--gpus", "2", "--gpu", "A100-40GB", "--no-calibration", "--quiet", "--model", "gpt2"]
    few = ["--layers", "2", "--seq-len", "256", "--precision", "bf16"]
    assert main([*flags, *few, "--activation-checkpointing", "none"]) == 0
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert "failed" in rows["ddp"]
    assert "fits" in rows["fsdp"]
    assert (
        "ddp in bf16 with checkpointing none: AssertionError: no such size (evaluation.py" in shown
    )


def test_a_planner_that_fails_on_everything_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(choice: Choice, cluster: Cluster, **options: Any) -> Assessment:
        raise AssertionError(choice.label)

    monkeypatch.setattr("launcher.forecast.evaluation.assess", fail)
    flags = ["--gpus", "1", "--gpu", "A100-40GB", "--no-calibration", "--quiet", "--model", "gpt2"]
    assert main([*flags, "--strategy", "single"]) == ExitCode.FAILED
    error = capsys.readouterr().err
    assert "failed on all" in error
    assert "AssertionError: single" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("used", "live", "fitting"),
    [
        ((50, 60, 70, 80), (50, 60, 70, 80), [0, 1, 2, 3]),
        ((50, 60, 99, 80), (50, 60, 70, 80), [0, 1, 3]),
        ((50, 99, 99, 80), (50, 60, 70, 80), [0]),
        ((50, 120, 80), (50, 120, 80), [0]),
    ],
    ids=["all", "one-fails-between", "two-fail-in-a-row", "live-bytes-fail"],
)
def test_reserved_bytes_that_fall_do_not_hide_a_larger_micro_batch(
    used: tuple[int, ...],
    live: tuple[int, ...],
    fitting: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def evaluated(_: Any, run: Any) -> SimpleNamespace:
        number = run.number
        found = SimpleNamespace(verdict=verdict(used[number], 100), memory_bytes=100)
        found.prediction = SimpleNamespace(peak_bytes=live[number])
        return found

    monkeypatch.setattr(MicroBatches, "_evaluate", evaluated)
    monkeypatch.setattr("launcher.forecast.assess.PredictionCache", lambda *_: None)
    runs = [
        SimpleNamespace(
            number=number,
            accumulation=2,
            config=SimpleNamespace(data=SimpleNamespace(micro_batch=2**number)),
        )
        for number in range(len(used))
    ]
    choice: Any = SimpleNamespace(runs=runs)
    cluster: Any = SimpleNamespace(fixed_bytes=0)
    assert MicroBatches(choice, cluster).with_verdict(("fits",)) == fitting
    for number in range(6):
        found = MicroBatches(choice, cluster, 2**number).with_verdict(("fits",))
        assert found[-1] >= fitting[-1]
        assert verdict(used[found[-1]], 100) == "fits"


def test_an_expected_micro_batch_is_confirmed_by_two_predictions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = ["--model=gpt2", "--layers=2", "--strategy=single", "--precision=bf16"]
    (choice,) = tried(*flags, "--activation-checkpointing=none", gpus=1)
    cluster = cluster_of("--gpus", "1", "--gpu", "H100", "--gpu-memory", "4GiB")
    found = assess(choice, cluster)
    assert 1 < (found.largest_micro_batch or 0) < 128
    evaluated: list[Any] = []
    original = MicroBatches._evaluate

    def counted(self: MicroBatches, run: Any) -> Assessment:
        evaluated.append(run)
        return original(self, run)

    monkeypatch.setattr(MicroBatches, "_evaluate", counted)
    again = assess(choice, cluster, expected=found.largest_micro_batch)
    assert again.largest_micro_batch == found.largest_micro_batch
    assert len(evaluated) == 2
