"""The search behind `--micro-batch auto`: what it tries, what it takes, what it remembers."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.checkpoint.extra import Extra
from launcher.config.arguments import parse_run_config, with_micro_batch
from launcher.config.resolve import resolve
from launcher.config.schema import AutoMicroBatch, RunConfig
from launcher.forecast import micro_batch, trials
from launcher.forecast.fit import Room, needed_bytes
from launcher.forecast.micro_batch import estimate, largest, plan_micro_batch, sizes_of
from launcher.forecast.micro_batch_cache import MicroBatchCache
from launcher.run.prepare import with_saved_micro_batch
from launcher.util.errors import UserError
from launcher.util.sizes import GIB


@pytest.mark.parametrize("true_largest", [1, 2, 7, 33, 100, 1000, 54_321])
@pytest.mark.parametrize("estimate", [0.1, 0.8, 1.0, 1.1, 30.0])
def test_the_largest_is_found_within_3_percent(true_largest: int, estimate: float) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= true_largest

    found = largest(range(1, 2**17 + 1), int(estimate * true_largest), fits)
    assert found is not None
    assert true_largest / 1.03 - 1 < found <= true_largest
    assert len(set(tried)) == len(tried) < 30
    if estimate == 1.0:
        assert len(tried) <= 2


@pytest.mark.parametrize(("room", "found"), [(1, 1), (3, 3), (8, 8), (11, 8), (23, 12), (24, 24)])
def test_among_divisors_the_exact_largest_is_found(room: int, found: int) -> None:
    divisors = sizes_of(RunConfig().replace(global_batch=48), 2)
    assert list(divisors) == [1, 2, 3, 4, 6, 8, 12, 24]
    for start in (1, 5, 24):
        assert largest(divisors, start, lambda size: size <= room) == found


def test_no_size_is_larger_than_the_data() -> None:
    config = RunConfig().replace(tensor_parallel=2)
    assert sizes_of(config, 4, 1001)[-1] == 500
    assert list(sizes_of(config, 4, 1)) == [1]
    assert sizes_of(config, 4, 10**9)[-1] == 2**17
    assert sizes_of(config.replace(global_batch=48), 4, 10)[-1] == 24


def test_without_a_micro_batch_a_divisor_of_the_share_is_taken() -> None:
    def size(*flags: str, ranks: int = 2) -> int:
        config = parse_run_config(flags, world_size=ranks)
        return resolve(config, world_size=ranks, device_type="cpu").config.data.micro_batch

    assert size() == size("--global-batch", "48") == 8
    assert size("--global-batch", "12") == 6
    assert size("--global-batch", "22") == 1  # 11 sequences for each rank
    assert size("--global-batch", "24", "--tensor-parallel", "2") == 8
    with pytest.raises(UserError, match="--global-batch 12"):
        size("--global-batch", "12", "--micro-batch", "8")


def test_on_a_gpu_the_plan_chooses_among_divisors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    room = Room(size_bytes=12 * GIB, gpu="NVIDIA H100 80GB HBM3", capped=False)
    monkeypatch.setattr(micro_batch, "free_on_gpus", lambda: (room.gpu, room.size_bytes))
    flags = ["--model=gpt2", "--global-batch=512", "--precision=bf16", "--strategy=fsdp"]
    assert parse_run_config(flags, world_size=2).data.leaves_micro_batch_open
    *kept, chosen = plan_micro_batch(flags, ranks=2)
    assert kept == flags
    size = int(chosen.removeprefix("--micro-batch="))
    assert capsys.readouterr().err.startswith(f"shardscale: micro-batch {size} of 256 sequences")

    def needed(size: int) -> int:
        config = parse_run_config([*flags, f"--micro-batch={size}"], world_size=2)
        run = resolve(config, world_size=2, device_type="cuda")
        return needed_bytes(run, room)

    assert needed(size) <= 0.95 * room.size_bytes < needed(2 * size)
    config = parse_run_config([*flags, chosen], world_size=2)
    assert not config.data.leaves_micro_batch_open

    room = replace(room, size_bytes=GIB)
    assert plan_micro_batch(flags, ranks=2)[-1] == "--micro-batch=1"
    assert "by the plan not even that fits in 1.00GiB" in capsys.readouterr().err


def test_a_smaller_divisor_is_taken_where_the_estimate_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def needed(size: int) -> int:
        return int((5 + max(0.0, 1.65 * (size - 8))) * GIB)

    limit, sizes = int(0.95 * 12 * GIB), sizes_of(RunConfig().replace(global_batch=120), 2)
    assert estimate(sizes, limit, needed) == 15
    monkeypatch.setattr(micro_batch, "free_on_gpus", lambda: ("NVIDIA H100 80GB HBM3", 12 * GIB))
    monkeypatch.setattr(micro_batch, "_needed", lambda *_: needed)
    assert plan_micro_batch(["--global-batch=120"], ranks=2)[-1] == "--micro-batch=10"
    assert "the largest planned to fit" in capsys.readouterr().err


def test_where_no_gpu_answers_the_run_starts_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def silent() -> Any:
        raise UserError("the GPUs do not say what is free")

    monkeypatch.setattr(micro_batch, "free_on_gpus", silent)
    assert plan_micro_batch(["--global-batch=12"], ranks=2)[-1] == "--micro-batch=6"
    assert "the GPUs do not say" in capsys.readouterr().err


@pytest.mark.parametrize(("saved", "ranks", "size"), [(4, 2, 4), (4, 8, 8), (None, 2, 8)])
def test_a_resumed_run_keeps_its_micro_batch_where_it_divides(
    saved: int | None, ranks: int, size: int
) -> None:
    extra: Extra = {} if saved is None else {"config": {"micro_batch": saved}}
    config = RunConfig().replace(global_batch=16)
    kept = with_saved_micro_batch(config, extra, world_size=ranks)
    assert kept.data.micro_batch == size
    assert kept.data.leaves_micro_batch_open == (size == 8)


@pytest.mark.parametrize("room", [50, 101, 2_000, 10_000, 10**9])
def test_what_should_fit_is_estimated_without_tracing_far_beyond_it(room: int) -> None:
    """A trace at 131,072 sequences would take minutes."""
    sizes, tried = range(1, 2**17 + 1), []

    def needed(size: int) -> int:
        tried.append(size)
        return 90 + max(3 * size, 10)  # the optimizer's step is the peak of the smallest

    expected = max([n for n in sizes if needed(n) <= room], default=1)
    tried.clear()
    assert estimate(sizes, room, needed) == expected
    assert max(tried) <= 4 * expected


def test_nothing_fits() -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return False

    assert largest(range(1, 100), 5, fits) is None
    assert tried[0] == 5
    assert tried[-1] == 1


def test_auto_is_a_value_of_the_flag_and_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("micro_batch: auto\n")
    for argv in (["--micro-batch", "auto"], ["--micro_batch=auto"], [f"--config={file}"]):
        config = parse_run_config(argv)
        assert isinstance(config.data.micro_batch, AutoMicroBatch)
        assert config.flat()["micro_batch"] == "auto"
        assert isinstance(config.replace(seed=3).data.micro_batch, AutoMicroBatch)
        # whatever can be refused is refused with the smallest
        assert resolve(config, world_size=2, device_type="cpu").global_batch == 2
        settled = parse_run_config(with_micro_batch(argv, 12))
        assert settled.data.micro_batch == 12
        assert settled == config.replace(micro_batch=12)
    assert parse_run_config([f"--config={file}", "--micro-batch", "5"]).data.micro_batch == 5
    with pytest.raises(UserError, match="a whole number, or auto"):
        parse_run_config(["--micro-batch", "most"])


def test_a_found_size_is_remembered_for_what_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDSCALE_CACHE", str(tmp_path))
    config = parse_run_config(["--micro-batch=auto", "--memory-limit=1GiB"])
    MicroBatchCache(config, None, 2, 2**17).save(12, 2**30)

    def known(ranks: int = 2, memory_bytes: int = 2**30, **changes: object) -> int | None:
        found = MicroBatchCache(config.replace(**changes), None, ranks, 2**17).get(memory_bytes)
        return None if found is None else found[0]

    assert known() == 12
    assert known(steps=7, seed=5, out=Path("elsewhere")) == 12
    for changes in ({"precision": "bf16"}, {"layers": 3}, {"global_batch": 64}, {"zero": 2}):
        assert known(**changes) is None
    assert known(memory_limit="2GiB") is None
    assert known(ranks=4) is None
    with monkeypatch.context() as patch:
        patch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
        assert known() is None
    assert known(memory_bytes=2**29) is None
    for path in (tmp_path / "micro-batch").iterdir():
        path.write_text(path.read_text()[:30])
    assert known() is None


def test_a_found_size_is_of_the_content_of_a_deepspeed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDSCALE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "ds.json"

    def cache(bucket: int) -> MicroBatchCache:
        section = {"stage": 2, "reduce_bucket_size": bucket}
        file.write_text(json.dumps({"zero_optimization": section}))
        config = parse_run_config(["--micro-batch=auto", f"--deepspeed={file}"])
        return MicroBatchCache(config, None, 2, 2**17)

    cache(10**6).save(12, 2**30)
    found = cache(10**6).get(2**30)
    assert found is not None
    assert found[0] == 12
    assert cache(10**9).get(2**30) is None


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [("", 1), ("--strategy=ddp", 2), ("--strategy=fsdp", 2), ("--zero=2", 2)],
)
def test_a_larger_micro_batch_needs_more_and_deepspeed_most(flags: str, ranks: int) -> None:
    room = Room(size_bytes=2**30, gpu=None, capped=True)

    def needed(size: int) -> int:
        config = parse_run_config(
            f"--layers=2 --d-model=64 --heads=4 --context=32 --vocab-size=260 --micro-batch={size} "
            f"--tokenizer=byte {flags}".split()
        )
        return needed_bytes(resolve(config, world_size=ranks, device_type="cpu"), room)

    sizes = [needed(size) for size in (1, 8, 64)]
    assert sizes == sorted(set(sizes))
    assert (sizes[0] > 100 * 2**20) == ("zero" in flags)


TRIAL = """
import sys
from launcher.forecast import trials
trials.WORKER = "{worker}"
with trials.Trials.of([], ranks=2) as some:
    print(some.folder, flush=True)
    try:
        print(some.run(4), flush=True)
    except Exception as error:
        print(error)
    except trials.Stopped as stopped:
        print(stopped, stopped.exit_code)
"""
POPEN = subprocess.Popen
WORKERS = {
    "out_of_memory": "sys.exit(3 if rank == '1' else time.sleep(600))",
    "fine": "sys.exit(0)",
    "broken": "sys.exit('no such thing as ' + rank)",
    "slow": "time.sleep(600)",
}


def start(folder: Path, worker: str) -> "subprocess.Popen[str]":
    source = f"import os, sys, time\nrank = os.environ['RANK']\n{WORKERS[worker]}\n"
    (folder / f"{worker}_worker.py").write_text(source)
    paths = [str(folder), str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-c", TRIAL.format(worker=f"{worker}_worker")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("worker", "says"),
    [("out_of_memory", "False"), ("fine", "True"), ("broken", "no such thing as ")],
)
def test_a_trial_ends_with_all_its_ranks_and_files(tmp_path: Path, worker: str, says: str) -> None:
    process = start(tmp_path, worker)
    said, _ = process.communicate(timeout=300)
    folder, outcome = said.splitlines()
    assert says in outcome
    assert not Path(folder).exists()
    assert _processes_of(f"{worker}_worker") == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_trial_too(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "slow")
    assert process.stdout is not None
    folder = process.stdout.readline().strip()
    while len(_processes_of("slow_worker")) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    said, _ = process.communicate(timeout=300)
    assert said.split()[-1] == "5"  # preempted
    assert number.name in said
    assert not Path(folder).exists()
    assert _processes_of("slow_worker") == []


def test_a_signal_while_a_rank_is_started_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python runs its handler right behind the start, before the process is in any list."""
    started: list[subprocess.Popen[bytes]] = []

    def start_and_signal(*args: Any, **kwargs: Any) -> "subprocess.Popen[bytes]":
        started.append(POPEN([sys.executable, "-c", "import time; time.sleep(600)"]))
        os.kill(os.getpid(), signal.SIGTERM)
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start_and_signal)
    with pytest.raises(trials.Stopped, match="SIGTERM"), trials.Trials.of([], ranks=1) as own:
        own.run(1)
    assert [process.poll() for process in started] == [-signal.SIGKILL]


def _processes_of(worker: str) -> Sequence[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[1:3] == ["-m", worker]:
            found.append(process)
    return found
