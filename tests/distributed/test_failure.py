"""A run that cannot go on ends as a whole, says why once, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import HERE, MODEL_FLAGS, TORCHRUN, environment, torchrun, write_text
from harness import run as run_command

ENDS_WITHIN_S = 60.0  # on a busy machine; a run that does not notice would take an hour
REFUSED, OUT_OF_MEMORY, FAILED, PREEMPTED = 2, 3, 4, 5


@dataclass(frozen=True, kw_only=True)
class Started:
    """A training run in its loop: the torchrun agent and, by rank, its workers."""

    agent: "subprocess.Popen[str]"
    workers: list[psutil.Process]
    out: Path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


def flags(text: Path, out: Path) -> list[str]:
    return [
        *MODEL_FLAGS,
        f"--data={text}",
        "--steps=1000000",
        "--log-every=1",
        "--no-tensorboard",
        f"--out={out}",
    ]


@contextmanager
def running(
    text: Path, out: Path, *more: str, torchrun_flags: Sequence[str] = ()
) -> Iterator[Started]:
    """Two ranks that have taken their first steps."""
    agent = subprocess.Popen(
        [
            TORCHRUN,
            "--nproc",
            "2",
            *torchrun_flags,
            "-m",
            "launcher.train",
            *flags(text, out),
            *more,
        ],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    workers: list[psutil.Process] = []
    try:
        while not _has_stepped(out):
            assert agent.poll() is None, agent.communicate()[1]
            time.sleep(0.1)
        children = psutil.Process(agent.pid).children(recursive=True)
        workers = sorted(
            (child for child in children if "RANK" in child.environ()),
            key=lambda child: int(child.environ()["RANK"]),
        )
        assert len(workers) == 2
        yield Started(agent=agent, workers=workers, out=out)
    finally:
        for process in (*workers, psutil.Process(agent.pid) if agent.poll() is None else None):
            if process is not None and process.is_running():
                process.kill()
        agent.communicate()


def _has_stepped(out: Path) -> bool:
    path = out / "rank0.jsonl"
    return path.exists() and '"kind": "step"' in path.read_text(encoding="utf-8")


def steps_of(out: Path, rank: int = 0) -> list[int]:
    """The steps that a rank has recorded, in the order of its file."""
    lines = (out / f"rank{rank}.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["step"] for record in map(json.loads, lines) if record["kind"] == "step"]


def status_of(out: Path) -> dict[str, Any]:
    status: dict[str, Any] = json.loads((out / "status.json").read_text(encoding="utf-8"))
    return status


def ended(run: Started) -> str:
    """Wait until the agent and both workers are gone; what they wrote to stderr."""
    _, errors = run.agent.communicate(timeout=ENDS_WITHIN_S)
    _, alive = psutil.wait_procs(run.workers, timeout=ENDS_WITHIN_S)
    assert not alive
    return errors


def broken_run(
    text: Path, out: Path, *more: str, fault: str, rank: int
) -> "subprocess.CompletedProcess[str]":
    return torchrun(
        2,
        "-m",
        "launcher.train",
        *flags(text, out),
        *more,
        PYTHONPATH=os.pathsep.join([str(HERE / "faults"), *filter(None, sys.path)]),
        FAULT=fault,
        FAULT_RANK=str(rank),
    )


@pytest.mark.parametrize(
    ("sharding", "rank", "step"),
    # DeepSpeed calls the optimizer once while it starts.
    [("--strategy=ddp", 1, 3), ("--strategy=fsdp", 0, 3), ("--zero=2", 1, 2)],
)
def test_an_exception_on_one_rank(
    sharding: str, rank: int, step: int, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    done = broken_run(text, out, sharding, fault="raise", rank=rank)
    assert done.returncode == FAILED
    assert done.stderr.count("RuntimeError: the moments went missing") == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert f"rank {rank} failed while in step of step {step}" in done.stderr
    status = status_of(out)
    assert (status["state"], status["rank"]) == ("failed", rank)
    assert status["phase"] == f"step of step {step}"
    assert status["reason"] == "RuntimeError: the moments went missing"
    assert status["exit_code"] == FAILED


def test_a_rank_that_hangs(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = broken_run(text, out, "--collective-timeout-s=5", fault="hang", rank=1)
    assert done.returncode == FAILED
    assert done.stderr.count("Traceback (most recent call last)") == 1
    status = status_of(out)
    assert (status["state"], status["rank"]) == ("failed", 0)
    assert "of step" in status["phase"]
    assert "imed out" in status["reason"]
    # Who waited for whom: the hanging rank could not say so itself.
    assert "sitecustomize.py" in status["detail"]["ranks_of_this_node"]["1"]
    assert "rank 1 was in step (sitecustomize.py" in done.stderr
    assert "in step" in (out / "stack-rank1.txt").read_text(encoding="utf-8")
    recorded = json.loads((out / "flight-recorder-rank0.json").read_text(encoding="utf-8"))
    assert recorded["entries"][-1]["profiling_name"].startswith("gloo:")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed(rank: int, text: Path, tmp_path: Path) -> None:
    with running(text, tmp_path / "run") as run:
        run.workers[rank].kill()
        errors = ended(run)
    assert run.agent.returncode == FAILED
    status = status_of(run.out)
    assert status["state"] == "failed"
    assert status["rank"] == rank
    assert "SIGKILL" in status["reason"]
    assert "SIGKILL" in errors


def test_sigterm_saves_and_the_run_goes_on_in_its_folder(text: Path, tmp_path: Path) -> None:
    """Meanwhile nobody else may use the folder."""
    out = tmp_path / "run"
    with running(text, out) as run:
        second = torchrun(2, "-m", "launcher.train", *flags(text, out), "--resume=auto")
        assert second.returncode == REFUSED
        assert "in use by a run that is alive" in second.stderr
        run.agent.send_signal(signal.SIGTERM)
        errors = ended(run)
    assert run.agent.returncode == PREEMPTED, errors
    assert status_of(out)["state"] == "preempted"
    reached = steps_of(out)[-1]
    more = [f"--stop-after={reached + 3}", "--resume=auto"]
    done = torchrun(1, "-m", "launcher.train", *flags(text, out), *more)
    assert done.returncode == 0, done.stderr
    assert steps_of(out) == list(range(1, reached + 4))
    assert steps_of(out, rank=1) == list(range(1, reached + 1))
    assert status_of(out)["state"] == "completed"


def test_a_killed_rank_is_restarted_and_no_step_counts_twice(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    more = ["--save-every=5", "--zero=2"]
    with running(text, out, *more, torchrun_flags=["--max-restarts=1"]) as run:
        while not list((out / "checkpoints").glob("step-*")):
            time.sleep(0.1)
        run.workers[0].kill()
        while '"resumed"' not in (out / "rank0.jsonl").read_text(encoding="utf-8"):
            assert run.agent.poll() is None
            time.sleep(0.1)
        run.agent.send_signal(signal.SIGTERM)
        errors = ended(run)
    assert run.agent.returncode == PREEMPTED, errors
    assert steps_of(out) == list(range(1, len(steps_of(out)) + 1))


def test_running_out_of_memory_is_not_tried_again(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    big = ["--d-model=2048", "--memory-limit=1GiB", f"--out={out}"]
    done = run_command(
        [TORCHRUN, "--max-restarts=3", "-m", "launcher.train", *flags(text, out), *big]
    )
    assert done.returncode == OUT_OF_MEMORY, done.stderr
    assert done.stderr.count("out of memory on rank 0") == 1
    assert not list(out.glob("failure-*.json"))


def test_a_loss_that_stays_nan_ends_the_run(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    more = ["--lr=1e30", "--clip=0", "--max-skipped-steps=4"]
    done = torchrun(2, "-m", "launcher.train", *flags(text, out), *more)
    assert done.returncode == FAILED
    assert "training has diverged: the loss is nan from step 2 on" in done.stderr
    assert "Traceback" not in done.stderr
    lines = (out / "rank0.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record for record in map(json.loads, lines) if record["kind"] == "step"]
    assert [record["applied"] for record in steps[-4:]] == [False] * 4
    assert steps[0]["applied"]


def test_ctrl_c_reaches_the_workers_too(text: Path, tmp_path: Path) -> None:
    """A terminal sends SIGINT to the whole process group, not to the agent alone."""
    with running(text, tmp_path / "run") as run:
        for process in run.workers:
            process.send_signal(signal.SIGINT)
        run.agent.send_signal(signal.SIGINT)
        errors = ended(run)
    assert run.agent.returncode == FAILED
    status = status_of(run.out)
    assert status["state"] == "failed"
    assert "stopped by SIG" in status["reason"]
    assert "Traceback" not in errors


def test_workers_do_not_outlive_a_killed_agent(text: Path, tmp_path: Path) -> None:
    with running(text, tmp_path / "run") as run:
        run.agent.kill()
        ended(run)
    assert run.agent.returncode == -signal.SIGKILL
    assert not any(worker.is_running() for worker in run.workers)
