"""A run that cannot go on ends as a whole, says why once, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import (
    HERE,
    MODEL_FLAGS,
    TIMEOUT_S,
    TORCHRUN,
    environment,
    forked,
    run_ranks,
    torchrun,
    train,
    write_text,
)
from harness import run as run_command

ENDS_WITHIN_S = 60.0  # on a busy machine; a run that does not notice would take an hour
REFUSED, OUT_OF_MEMORY, FAILED, PREEMPTED, INTERRUPTED = 2, 3, 4, 5, 130


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
        "--report-to=none",
        f"--out={out}",
    ]


@contextmanager
def running(
    text: Path,
    out: Path,
    *more: str,
    torchrun: Sequence[str | Path] = (TORCHRUN,),
    torchrun_flags: Sequence[str] = (),
) -> Iterator[Started]:
    """Two ranks that have taken their first steps."""
    agent = subprocess.Popen(
        [
            *torchrun,
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
        workers = ranks_of(agent)
        yield Started(agent=agent, workers=workers, out=out)
    finally:
        for process in (*workers, psutil.Process(agent.pid) if agent.poll() is None else None):
            if process is not None and process.is_running():
                process.kill()
        agent.communicate()


def ranks_of(agent: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Return the two workers of an agent, by rank."""
    children = psutil.Process(agent.pid).children(recursive=True)
    workers = sorted(
        (child for child in children if "RANK" in child.environ()),
        key=lambda child: int(child.environ()["RANK"]),
    )
    assert len(workers) == 2
    return workers


def _has_stepped(out: Path) -> bool:
    path = out / "rank0.jsonl"
    return path.exists() and '"kind": "step"' in path.read_text(encoding="utf-8")


def records_of(out: Path) -> str:
    """Return what rank 0 has recorded; nothing where it has not begun."""
    path = out / "rank0.jsonl"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def steps_of(out: Path, rank: int = 0) -> list[int]:
    """The steps that a rank has recorded, in the order of its file."""
    lines = (out / f"rank{rank}.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["step"] for record in map(json.loads, lines) if record["kind"] == "step"]


def saved_steps(out: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (out / "checkpoints").glob("step-*"))


def own_lines(errors: str) -> list[str]:
    """Return the lines of standard error without those of a corpus that is built."""
    return [line for line in errors.splitlines() if not line.startswith("data: ")]


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
    text: Path, out: Path, *more: str, fault: str, rank: int, is_forked: bool = False
) -> "subprocess.CompletedProcess[str]":
    asked = {"FAULT": fault, "FAULT_RANK": str(rank)}
    if is_forked:
        return forked(2, "broken_rank", *flags(text, out), *more, **asked)
    paths = os.pathsep.join([str(HERE / "faults"), *filter(None, sys.path)])
    return torchrun(2, "-m", "launcher.train", *flags(text, out), *more, PYTHONPATH=paths, **asked)


@pytest.mark.parametrize(
    ("sharding", "rank", "step"),
    # DeepSpeed calls the optimizer once while it starts.
    [("--strategy=fsdp", 0, 3), ("--zero=2", 1, 2)],
)
def test_an_exception_on_one_rank(
    sharding: str, rank: int, step: int, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    # Under the agent once: the rank records and reports all of it.
    more = (sharding, "--report-to=wandb")
    done = broken_run(text, out, *more, fault="raise", rank=rank, is_forked=rank == 1)
    assert done.returncode == FAILED
    if rank == 0:  # closing a logger may take half a minute, within which others time out
        assert (out / "closed").read_text() == "failure recorded: True"
    assert done.stderr.count("RuntimeError: the moments went missing") == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert f"rank {rank} failed while in step of step {step}" in done.stderr
    status = status_of(out)
    assert (status["state"], status["rank"]) == ("failed", rank)
    assert status["phase"] == f"step of step {step}"
    assert status["reason"] == "RuntimeError: the moments went missing"
    assert status["exit_code"] == FAILED


def test_a_rank_that_rejects_sooner_leaves_rank_0_its_sentence(tmp_path: Path) -> None:
    done = run_ranks((2, "late_rank", f"--data={tmp_path}/absent.txt"))
    assert done.returncode == REFUSED
    assert done.stderr.count("shardscale: ") == 1
    assert "absent.txt" in done.stderr


def test_a_rank_that_hangs(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = broken_run(text, out, "--collective-timeout-s=20", fault="hang", rank=1)
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


def test_sigterm_saves_and_the_run_goes_on_in_its_folder(text: Path, tmp_path: Path) -> None:
    """Meanwhile nobody else may use the folder."""
    out = tmp_path / "run"
    with running(text, out) as run:
        for worker in run.workers:  # which need not train meanwhile
            worker.suspend()
        second = train(2, *flags(text, out), "--resume=auto")
        for worker in run.workers:
            worker.resume()
        assert second.returncode == REFUSED
        assert "in use by a run that is alive" in second.stderr
        run.agent.send_signal(signal.SIGTERM)
        errors = ended(run)
    assert run.agent.returncode == PREEMPTED, errors
    status = status_of(out)
    assert (status["state"], status["reason"]) == ("preempted", "stopped by SIGTERM")
    reached = steps_of(out)[-1]
    more = [f"--stop-after={reached + 3}", "--resume=auto"]
    done = train(1, *flags(text, out), *more)
    assert done.returncode == 0, done.stderr
    assert steps_of(out) == list(range(1, reached + 4))
    assert steps_of(out, rank=1) == list(range(1, reached + 1))
    assert status_of(out)["state"] == "completed"


def test_a_killed_rank_is_restarted_and_no_step_counts_twice(text: Path, tmp_path: Path) -> None:
    """Killed once more than it may be started again, it ends the run."""
    out = tmp_path / "run"
    more = ["--save-every=5", "--zero=2"]
    with running(text, out, *more, torchrun_flags=["--max-restarts=1"]) as run:
        while not list((out / "checkpoints").glob("step-*")):
            time.sleep(0.1)
        run.workers[0].kill()
        while '"resumed"' not in records_of(out):
            assert run.agent.poll() is None
            time.sleep(0.1)
        again = ranks_of(run.agent)
        again[1].kill()
        errors = ended(replace(run, workers=again))
    assert run.agent.returncode == FAILED
    assert steps_of(out) == list(range(1, len(steps_of(out)) + 1))
    status = status_of(out)
    assert (status["state"], status["rank"]) == ("failed", 1)
    assert "SIGKILL" in status["reason"]
    assert "SIGKILL" in errors


def test_restarts_do_not_take_over_the_run_that_took_the_folder(text: Path, tmp_path: Path) -> None:
    """Its ranks come too late: the first time, and each time that they are started again."""
    out, until = tmp_path / "run", tmp_path / "until"
    short = [*flags(text, out), "--test-batches=0"]
    slow = subprocess.Popen(
        [TORCHRUN, "--max-restarts=2", "-m", "launcher.train", *short, "--steps=9", "--seed=1"],
        env=environment(
            PYTHONPATH=os.pathsep.join([str(HERE / "faults"), *filter(None, sys.path)]),
            FAULT_RANK="0",
            FAULT_UNTIL=str(until),
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not any("RANK" in c.environ() for c in psutil.Process(slow.pid).children()):
            assert slow.poll() is None, slow.communicate()
            time.sleep(0.05)
        first = train(1, *short, "--steps=3")
        assert first.returncode == 0, first.stderr
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        until.touch()
        said, errors = slow.communicate(timeout=ENDS_WITHIN_S)
    finally:
        slow.kill()
        slow.communicate()
    assert slow.returncode == REFUSED
    refused = [line for line in own_lines(errors) if line.startswith("shardscale: --out ")]
    assert len(refused) == 3, errors
    assert sum("another start took this folder first" in line for line in refused) == 2
    assert "resumed" not in said
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_of_two_starts_in_a_race_one_trains(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"

    def start(seed: int) -> "subprocess.Popen[str]":
        more = ["--steps=3", "--test-batches=0", f"--seed={seed}"]
        return subprocess.Popen(
            [TORCHRUN, "--max-restarts=1", "-m", "launcher.train", *flags(text, out), *more],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    both = [start(1), start(2)]
    ends = [(*run.communicate(timeout=TIMEOUT_S), run.returncode) for run in both]
    assert sorted(code for *_, code in ends) == [0, REFUSED], ends
    assert status_of(out)["state"] == "completed"
    assert steps_of(out) == [1, 2, 3]
    (errors,) = (errors for _, errors, code in ends if code == REFUSED)
    assert f"shardscale: --out {out}" in errors
    assert "Traceback" not in errors


def test_running_out_of_memory_is_not_tried_again(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    big = ["--d-model=512", "--memory-limit=64MiB", f"--out={out}"]
    done = run_command(
        [TORCHRUN, "--max-restarts=3", "-m", "launcher.train", *flags(text, out), *big]
    )
    assert done.returncode == OUT_OF_MEMORY, done.stderr
    assert done.stderr.count("out of memory on rank 0") == 1
    assert not list(out.glob("failure-*.json"))


def test_a_loss_that_stays_nan_ends_the_run(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    more = ["--lr=1e30", "--clip=0"]
    done = train(2, *flags(text, out), *more)
    assert done.returncode == FAILED
    assert "training has diverged: the loss is nan from step 2 on" in done.stderr
    assert "Traceback" not in done.stderr
    lines = (out / "rank0.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record for record in map(json.loads, lines) if record["kind"] == "step"]
    assert [record["applied"] for record in steps[-20:]] == [False] * 20
    assert steps[0]["applied"]


def test_ctrl_c_reaches_the_workers_too(text: Path, tmp_path: Path) -> None:
    """Whoever sends it to all of them, and not to the agent alone, loses nothing either."""
    with running(text, tmp_path / "run") as run:
        for process in run.workers:
            process.send_signal(signal.SIGINT)
        run.agent.send_signal(signal.SIGINT)
        errors = ended(run)
    assert run.agent.returncode == INTERRUPTED
    status = status_of(run.out)
    assert (status["state"], status["exit_code"]) == ("preempted", INTERRUPTED)
    assert status["reason"] == "stopped by SIGINT"
    assert saved_steps(run.out) == [steps_of(run.out)[-1]]
    assert not own_lines(errors)


# The agent's thread for signals is slower than the main one, which sees that the ranks were killed.
SLOW_AFTER_KILLING = """
import sys, time
from launcher.run import agent_signals
kill = agent_signals._kill
agent_signals._kill = lambda ranks: (kill(ranks), time.sleep(3))
from launcher import torchrun
sys.exit(torchrun.main())
"""


@pytest.mark.parametrize("torchrun", [(TORCHRUN,), (sys.executable, "-c", SLOW_AFTER_KILLING)])
def test_a_second_ctrl_c_ends_a_run_that_cannot_save(
    text: Path, tmp_path: Path, torchrun: Sequence[str | Path]
) -> None:
    with running(text, tmp_path / "run", torchrun=torchrun) as run:
        run.workers[0].suspend()
        while run.agent.poll() is None:  # of two at the same time the kernel keeps one
            run.agent.send_signal(signal.SIGINT)
            time.sleep(0.5)
        errors = ended(run)
    assert run.agent.returncode == INTERRUPTED
    status = status_of(run.out)
    assert (status["state"], status["exit_code"]) == ("failed", INTERRUPTED)
    assert own_lines(errors) == ["shardscale: stopped by SIGINT twice, before it was saved"]
    assert saved_steps(run.out) == []


@contextmanager
def alone(text: Path, out: Path, *more: str) -> Iterator["subprocess.Popen[str]"]:
    """A run of one process, without an agent."""

    def hear() -> None:  # though the tests may run under nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    process = subprocess.Popen(
        [sys.executable, "-m", "launcher.train", *flags(text, out), *more],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_run_that_is_killed_loses_what_came_after_the_clock(text: Path, tmp_path: Path) -> None:
    """The last of its checkpoints by the clock stays, until there is another one."""
    out = tmp_path / "run"
    with alone(text, out, "--save-minutes=0.002") as run:
        while '"name": "saved"' not in records_of(out):
            assert run.poll() is None, run.communicate()
            time.sleep(0.01)
        run.kill()
        run.communicate()
    reached = max(saved_steps(out))
    steps = 10 * (reached // 10 + 3)
    more = ["--resume=auto", "--save-minutes=0.002", f"--save-every={steps - 10}"]
    more += [f"--stop-after={steps}", "--test-batches=0"]
    done = train(1, *flags(text, out), *more)
    assert done.returncode == 0, done.stderr
    assert f"after step {reached}" in done.stdout
    assert f"saves every {steps - 10} steps, every 0.002 minutes (--save-minutes), at the end" in (
        done.stdout
    )
    assert saved_steps(out) == [steps - 10, steps]
    assert records_of(out).count('"name": "saved"') >= 3
    assert steps_of(out) == list(range(1, steps + 1))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_terminal_ends_a_run_of_one_process(
    number: signal.Signals, text: Path, tmp_path: Path
) -> None:
    with alone(text, tmp_path / "run") as run:
        while not _has_stepped(tmp_path / "run"):
            assert run.poll() is None, run.communicate()
            time.sleep(0.05)
        run.send_signal(number)
        said, errors = run.communicate(timeout=ENDS_WITHIN_S)
    code = INTERRUPTED if number == signal.SIGINT else PREEMPTED
    assert run.returncode == code
    assert not own_lines(errors)
    status = status_of(tmp_path / "run")
    assert (status["state"], status["exit_code"]) == ("preempted", code)
    assert status["reason"] == f"stopped by {number.name}"
    reached = steps_of(tmp_path / "run")[-1]
    assert saved_steps(tmp_path / "run") == [reached]
    assert said.splitlines()[-1].startswith(f"preempted after step {reached}: resume with")


def test_a_second_signal_ends_a_run_of_one_process_at_once(text: Path, tmp_path: Path) -> None:
    with alone(text, tmp_path / "run") as run:
        while not _has_stepped(tmp_path / "run"):
            assert run.poll() is None, run.communicate()
            time.sleep(0.05)
        # Both are there when it goes on, and Python takes them in the order of their numbers.
        for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGHUP, signal.SIGCONT):
            run.send_signal(number)
        _, errors = run.communicate(timeout=ENDS_WITHIN_S)
    assert run.returncode == INTERRUPTED
    status = status_of(tmp_path / "run")
    assert (status["state"], status["exit_code"]) == ("failed", INTERRUPTED)
    last = errors.splitlines()[-1]
    assert last.startswith("shardscale: stopped by SIGINT while in ")
    assert "Traceback" not in errors
    assert saved_steps(tmp_path / "run") == []


def test_a_run_that_has_just_its_folder_does_not_stay_running(text: Path, tmp_path: Path) -> None:
    with alone(text, tmp_path / "run") as run:
        while not (tmp_path / "run" / "status.json").exists():
            assert run.poll() is None, run.communicate()
            time.sleep(0.001)
        run.send_signal(signal.SIGHUP)
        said, errors = run.communicate(timeout=ENDS_WITHIN_S)
    assert (run.returncode, status_of(tmp_path / "run")["state"]) == (PREEMPTED, "preempted"), said
    assert "Traceback" not in errors
