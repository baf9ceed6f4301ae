"""The batch scripts and `shardscale submit` on a real Slurm of two nodes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from cluster import Cluster, wait_for, why_not
from harness import MODEL_FLAGS, train, write_text

from launcher.compare.report.find import read_sweep

pytestmark = pytest.mark.slurm

SLURM = Path(__file__).parents[2] / "slurm"
# Two nodes with a rank each, on the CPU.
ON_CPUS = ("--nodes=2", "--gpus-per-node=0", "--ntasks-per-node=1")
FLAGS = (*MODEL_FLAGS, "--micro-batch=2", "--global-batch=8", "--report-to=none")
ENDLESS = ("--steps=1000000",)
# Enough for a signal to arrive in between, whatever else the machine does.
STEPS = 300
SIGNAL = ("scancel", "--batch", "--signal=USR1")
# The job finds the interpreter of these tests first, as it does that of an active environment.
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def wait_for_requeue(cluster: Cluster, job: str, cwd: Path) -> None:
    def is_over() -> bool:
        shown = cluster.job(job)
        return shown["Restarts"] == "1" or shown["JobState"] in ("COMPLETED", "FAILED")

    wait_for(f"job {job} to be requeued", is_over, every_s=0.3)
    assert cluster.job(job)["Restarts"] == "1", (cluster.job(job), log(cwd, job))


def wait_for_empty(cluster: Cluster, name: str) -> None:
    wait_for(f"{name} to be empty", lambda: not cluster.processes(name))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no Slurm cluster: {reason}")
    with Cluster(["n1", "n2"]) as running:
        try:
            yield running
        finally:
            print(running.logs())  # pytest shows it when a test has failed


@pytest.fixture(autouse=True)
def _nothing_stays_in_the_queue(cluster: Cluster) -> Iterator[None]:
    """A test that fails leaves no job that would keep the next one waiting."""
    yield
    cluster.run("scancel", "--user=root")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / 'it\'s "my" $HOME file.txt')


def sbatch(cluster: Cluster, cwd: Path, *arguments: str | Path) -> str:
    """Submit from `cwd`; the job's number."""
    return cluster.run("sbatch", "--parsable", *arguments, cwd=cwd, PATH=PATH)


def submit(
    cluster: Cluster, cwd: Path, *arguments: str | Path
) -> "subprocess.CompletedProcess[str]":
    command = (sys.executable, "-m", "launcher", "submit", *arguments)
    return cluster.try_run(*command, cwd=cwd)


def log(cwd: Path, job: str) -> str:
    return (cwd / f"slurm-{job}.out").read_text(encoding="utf-8")


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return what rank 0 has recorded of that kind; none before it has begun."""
    if not (run / "rank0.jsonl").exists():
        return []
    text = (run / "rank0.jsonl").read_text(encoding="utf-8")
    return [record for record in map(_record, text.split("\n")) if record.get("kind") == kind]


def _record(line: str) -> dict[str, Any]:
    """Nothing of a line that is not whole: the last one while the run goes on, and the one inside
    which a rank was killed until the next attempt has taken it back.
    """
    try:
        record: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return record


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in records(run, "step")]


def status(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "status.json").read_text(encoding="utf-8"))
    return found


def check_resumed_once(run: Path, *, at: int) -> None:
    """The run has every step once, and went on in its own folder after step `at`."""
    assert status(run)["state"] == "completed"
    assert [record["step"] for record in records(run, "step")] == list(range(1, STEPS + 1))
    resumed = [event["step"] for event in records(run, "event") if event["name"] == "resumed"]
    assert resumed == [at]
    assert 0 < at < STEPS


def is_training(run: Path) -> bool:
    """Return whether steps are being recorded."""
    return bool(records(run, "step"))


def saved_step(run: Path) -> int:
    """The step of the newest checkpoint, 0 when there is none."""
    found = sorted((run / "checkpoints").glob("step-*"))
    return int(found[-1].name.removeprefix("step-")) if found else 0


def test_two_nodes_train_as_two_local_processes(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    flags = (*FLAGS, "--steps=10", "--strategy", "fsdp", "--data", str(text))
    # The cluster's GPUs are not real, but they are counted.
    job = sbatch(
        cluster, tmp_path, "--nodes=2", "--gpus-per-node=1", SLURM / "train.sbatch", *flags
    )
    assert cluster.wait_for_job(job, "COMPLETED", "FAILED") == "COMPLETED", log(tmp_path, job)

    local = tmp_path / "local"
    done = train(2, *flags, f"--out={local}")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / f"slurm-{job}"
    assert len(losses(run)) == 10
    assert losses(run) == pytest.approx(losses(local), rel=1e-6)
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    assert config["data"] == str(text)


def test_gpus_of_a_type_through_submit(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    flags = (*FLAGS, "--steps=3", "--data", str(text), "--device=auto")  # CPU, where none is real
    done = submit(cluster, tmp_path, "--gpus-per-node=a100:2", "--", *flags)
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[1]
    assert cluster.wait_for_job(job, "COMPLETED", "FAILED") == "COMPLETED", log(tmp_path, job)
    assert cluster.job(job)["TresPerNode"] == "gres:gpu:a100:2"
    assert "on 2 processes" in log(tmp_path, job)
    missing = submit(cluster, tmp_path, "--gpus-per-node=h100:2", "--", *flags)
    assert missing.returncode == 2
    assert "Requested node configuration is not available" in missing.stderr


def test_one_rank_through_submit(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    flags = (*FLAGS, "--steps=3", "--data", str(text), "--out", "my runs/first")
    done = submit(cluster, tmp_path, "--gpus-per-node", "0", "--job-name", "a name", "--", *flags)
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[1]
    assert cluster.wait_for_job(job, "COMPLETED", "FAILED") == "COMPLETED", log(tmp_path, job)
    assert cluster.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%j") == (
        "a name"
    )
    assert len(losses(tmp_path / "my runs" / "first")) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--", "--zreo=3", "--device=cpu"), "unknown flag --zreo: did you mean --zero?"),
        (("--zero=3", "--", "--device=cpu"), "unrecognized option '--zero=3'"),
        (("--partition=none", "--", "--device=cpu"), "invalid partition specified: none"),
        (("--mem=1T", "--", "--device=cpu"), "Requested node configuration is not available"),
    ],
)
def test_submit_refuses_bad_arguments(
    arguments: tuple[str, ...], said: str, cluster: Cluster, tmp_path: Path
) -> None:
    done = submit(cluster, tmp_path, "--gpus-per-node=0", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert cluster.run("squeue", "--noheader", "--states=PENDING,RUNNING") == ""


@pytest.mark.parametrize(
    ("path", "flags", "said"),
    [
        (PATH, ("--zero=5",), "--zero 5 must be one of 0, 1, 2, 3"),
        ("/usr/bin:/bin", (), "node n1: python cannot import shardscale"),
    ],
)
def test_a_job_that_cannot_start_says_why(
    path: str, flags: tuple[str, ...], said: str, cluster: Cluster, tmp_path: Path
) -> None:
    arguments: tuple[str | Path, ...]
    arguments = ("--parsable", *ON_CPUS, SLURM / "train.sbatch", "--device=cpu", *flags)
    job = cluster.run("sbatch", *arguments, cwd=tmp_path, PATH=path)
    cluster.wait_for_job(job, "FAILED")
    assert cluster.job(job)["ExitCode"] == "2:0"
    assert f"shardscale: {said}" in log(tmp_path, job)
    assert not (tmp_path / "runs").exists()


def test_a_preempted_job_saves_goes_back_to_the_queue_and_resumes(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    flags = (*FLAGS, f"--steps={STEPS}", "--data", str(text))
    jobs = [
        sbatch(cluster, tmp_path, *ON_CPUS, SLURM / "train.sbatch", *flags, "--zero=2"),
        sbatch(cluster, tmp_path, "--gpus-per-node=0", SLURM / "single_gpu.sbatch", *flags),
    ]
    runs = [tmp_path / "runs" / f"slurm-{job}" for job in jobs]
    waiting = dict(zip(jobs, runs, strict=True))

    def each_is_signalled_at_its_first_steps() -> bool:
        for job in [job for job, run in waiting.items() if is_training(run)]:
            cluster.run(*SIGNAL, job)
            del waiting[job]
        return not waiting

    wait_for("the first steps of both jobs", each_is_signalled_at_its_first_steps)
    saved = []
    for job, run in zip(jobs, runs, strict=True):
        wait_for_requeue(cluster, job, tmp_path)
        assert f"stopped; job {job} is requeued" in log(tmp_path, job)
        saved.append(saved_step(run))
    for job, run, step in zip(jobs, runs, saved, strict=True):
        assert cluster.wait_for_job(job, "COMPLETED", "FAILED") == "COMPLETED", log(tmp_path, job)
        check_resumed_once(run, at=step)


def processes_of(job: str) -> list[psutil.Process]:
    """The agent, the sweep or the ranks of a job, which all know its run folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(f"slurm-{job}" in part for part in process.cmdline()):
                found.append(process)
    return found


def listens(job: str) -> bool:
    """The script's first line has said what a signal means. Slurm calls a job running before
    that, and nothing in a script can make up for a signal that ends its shell.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if any(f"job{job:0>5}/slurm_script" in part for part in process.cmdline()):
                status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
                caught = int(status.split("SigCgt:")[1].split()[0], 16)
                return bool(caught >> (signal.SIGUSR1 - 1) & 1)
    return False


def starts(job: str) -> bool:
    return bool(processes_of(job))


def starts_ranks(job: str) -> bool:
    return any("RANK" in process.environ() for process in processes_of(job))


@pytest.mark.parametrize("number", ["USR1", "TERM"])
def test_a_signal_at_the_start_means_back_to_the_queue(
    number: str, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    """There is nothing to save yet."""
    moments = {
        "train.sbatch": (listens, starts, starts_ranks),
        "single_gpu.sbatch": (listens, starts),
    }
    flags = (*FLAGS, *ENDLESS, "--data", str(text))
    waiting = {}
    for script, whens in moments.items():
        for when in whens:
            job = sbatch(cluster, tmp_path, "--gpus-per-node=0", SLURM / script, *flags)
            waiting[job] = when
    jobs = list(waiting)

    def each_is_signalled_at_its_moment() -> bool:
        for job, when in list(waiting.items()):
            with contextlib.suppress(psutil.Error):
                if when(job):
                    cluster.run("scancel", "--batch", f"--signal={number}", job)
                    del waiting[job]
        return not waiting

    wait_for("the moments of all jobs", each_is_signalled_at_its_moment)
    for job in jobs:
        wait_for_requeue(cluster, job, tmp_path)
        cluster.run("scancel", job)
        assert f"stopped; job {job} is requeued" in log(tmp_path, job)
        assert not (tmp_path / "runs" / f"slurm-{job}" / "checkpoints").exists()


def test_a_killed_rank_is_started_again(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    flags = (*FLAGS, *ENDLESS, "--data", str(text), "--save-every=5")
    job = sbatch(cluster, tmp_path, "--gpus-per-node=0", SLURM / "train.sbatch", *flags)
    run = tmp_path / "runs" / f"slurm-{job}"
    wait_for("a checkpoint", lambda: saved_step(run) > 0)
    (rank,) = (process for process in processes_of(job) if "RANK" in process.environ())
    rank.kill()
    wait_for(
        "it to go on",
        lambda: any(event["name"] == "resumed" for event in records(run, "event")),
    )
    assert cluster.job(job)["JobState"] == "RUNNING"


def test_a_dead_node_brings_the_job_back_and_scancel_leaves_nothing(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    script = (*ON_CPUS, SLURM / "train.sbatch", *FLAGS, "--data", str(text))
    job = sbatch(cluster, tmp_path, *script, f"--steps={STEPS}", "--save-every=10", "--zero=2")
    run = tmp_path / "runs" / f"slurm-{job}"
    wait_for("a checkpoint", lambda: saved_step(run) > 0)

    cluster.kill_node("n2")
    wait_for("the job to be requeued", lambda: cluster.job(job)["Restarts"] == "1")
    wait_for("node n1 to be empty", lambda: not cluster.processes("n1"))
    step = saved_step(run)
    assert status(run)["state"] != "completed"
    cluster.start_node("n2")
    assert cluster.wait_for_job(job, "COMPLETED", "FAILED") == "COMPLETED", log(tmp_path, job)
    check_resumed_once(run, at=step)

    endless = sbatch(cluster, tmp_path, *script, *ENDLESS)
    wait_for("steps", lambda: is_training(tmp_path / "runs" / f"slurm-{endless}"))
    for name in ("n1", "n2"):
        assert any("launcher.train" in line for line in cluster.processes(name))
    cluster.run("scancel", endless)
    cluster.wait_for_job(endless, "CANCELLED")
    for name in ("n1", "n2"):
        wait_for_empty(cluster, name)
    assert cluster.job(endless)["JobState"] == "CANCELLED"
    assert cluster.job(endless)["Restarts"] == "0"


def test_a_sweep_is_an_array_with_a_report(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    grid = tmp_path / "grid.yaml"
    cells = [
        {"name": "long", "steps": STEPS},
        {"name": "short", "steps": 3, "seed": 1},
        {"name": "contradictory", "strategy": "single", "offload_optimizer": "cpu"},
        {"name": "broken", "strategy": "fsdp", "steps": 40, "lr": 1e9, "clip": 0.0},
    ]
    grid.write_text(yaml.safe_dump({"cells": cells}))
    out = tmp_path / 'my "own" sweep'
    behind = (*FLAGS, "--data", text, "--grid-file", grid, "--out", out)
    done = submit(cluster, tmp_path, "--sweep", "--gpus-per-node=0", "--", *behind)
    assert done.returncode == 0, done.stderr
    array, report = done.stdout.split()[1], done.stdout.split("; job ")[1].split()[0]
    run = out / "cells" / "long"
    wait_for("steps of the long cell", lambda: is_training(run))
    assert cluster.job(report)["Dependency"].startswith(f"afterany:{array}_")
    cluster.run(*SIGNAL, f"{array}_0")
    wait_for("it to be requeued", lambda: cluster.job(f"{array}_0")["Restarts"] == "1")
    step = saved_step(run)
    assert json.loads((out / "rows" / "long.json").read_text())["state"] == "interrupted"

    job_log = out / "logs" / f"slurm-{report}-report.out"
    assert cluster.wait_for_job(report, "COMPLETED", "FAILED") == "COMPLETED", job_log.read_text()
    check_resumed_once(run, at=step)
    rows = {row.name: row for row in read_sweep(out).cells}
    assert {name: row.state for name, row in rows.items()} == {
        "long": "completed",
        "short": "completed",
        "contradictory": "refused",
        "broken": "failed",
    }
    assert (rows["long"].figures or {})["test_loss"] > 0
    found = json.loads((out / "report" / "report.json").read_text())["runs"]
    assert {row["run"]: row["state"] for row in found} == {
        name: row.state for name, row in rows.items()
    }
    assert (out / "report" / "report.html").exists()
    # A cell that failed is a job that failed; one that cannot run has none.
    states = [cluster.job(f"{array}_{number}")["JobState"] for number in (0, 1, 3)]
    assert states == ["COMPLETED", "COMPLETED", "FAILED"]
    assert cluster.try_run("scontrol", "show", "job", f"{array}_2").returncode != 0
