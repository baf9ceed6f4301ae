"""The batch scripts and `memscale submit` on a real Slurm of two nodes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cluster import Cluster, wait_for, why_not
from distributed.harness import MODEL_FLAGS, torchrun, write_text

pytestmark = pytest.mark.slurm

SLURM = Path(__file__).parents[2] / "slurm"
# Two nodes with a rank each, on the CPU.
ON_CPUS = ("--nodes=2", "--gpus-per-node=0", "--ntasks-per-node=1")
FLAGS = (*MODEL_FLAGS, "--micro-batch=2", "--global-batch=8", "--no-tensorboard")
ENDLESS = ("--steps=1000000",)
# The job finds the interpreter of these tests first, as it does that of an active environment.
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


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


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / 'it\'s "my" $HOME file.txt')


def sbatch(cluster: Cluster, cwd: Path, *arguments: str | Path) -> str:
    """Submit from `cwd`; the job's number."""
    return cluster.run("sbatch", "--parsable", *arguments, cwd=cwd, PATH=PATH)


def submit(
    cluster: Cluster, cwd: Path, *arguments: str | Path
) -> "subprocess.CompletedProcess[str]":
    command = (sys.executable, "-m", "launcher.submit", *arguments)
    return cluster.try_run(*command, cwd=cwd)


def log(cwd: Path, job: str) -> str:
    return (cwd / f"slurm-{job}.out").read_text(encoding="utf-8")


def losses(run: Path) -> list[float]:
    records = map(json.loads, (run / "rank0.jsonl").read_text(encoding="utf-8").splitlines())
    return [record["loss"] for record in records if record["kind"] == "step"]


def is_training(run: Path) -> bool:
    """Whether steps are being recorded."""
    return (run / "rank0.jsonl").exists() and '"step"' in (run / "rank0.jsonl").read_text()


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
    done = torchrun(2, "-m", "launcher.train", *flags, "--out", local)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / f"slurm-{job}"
    assert len(losses(run)) == 10
    assert losses(run) == pytest.approx(losses(local), rel=1e-6)
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    assert config["data"] == str(text)


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
        ("/usr/bin:/bin", (), "node n1: python cannot import memscale"),
    ],
)
def test_a_job_that_cannot_start_says_why(
    path: str, flags: tuple[str, ...], said: str, cluster: Cluster, tmp_path: Path
) -> None:
    arguments = ("--parsable", *ON_CPUS, SLURM / "train.sbatch", "--device=cpu", *flags)
    job = cluster.run("sbatch", *arguments, cwd=tmp_path, PATH=path)
    cluster.wait_for_job(job, "FAILED")
    assert cluster.job(job)["ExitCode"] == "2:0"
    assert f"memscale: {said}" in log(tmp_path, job)
    assert not (tmp_path / "runs").exists()


def test_a_dead_node_brings_the_job_back_and_scancel_ends_it(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    script = (SLURM / "train.sbatch", *FLAGS, *ENDLESS, "--data", str(text))
    job = sbatch(cluster, tmp_path, *ON_CPUS, *script)
    runs = tmp_path / "runs"
    wait_for("the first steps", lambda: is_training(runs / f"slurm-{job}"))

    cluster.kill_node("n2")
    wait_for("the job to be requeued", lambda: cluster.job(job)["Restarts"] == "1")
    wait_for("node n1 to be empty", lambda: not cluster.processes("n1"))
    cluster.start_node("n2")
    wait_for("steps on both nodes again", lambda: is_training(runs / f"slurm-{job}-restart1"))
    assert any("launcher.train" in line for line in cluster.processes("n1"))
    assert any("launcher.train" in line for line in cluster.processes("n2"))

    cluster.run("scancel", job)
    cluster.wait_for_job(job, "CANCELLED")
    for name in ("n1", "n2"):
        wait_for(f"{name} to be empty", lambda name=name: not cluster.processes(name))
    assert cluster.job(job)["JobState"] == "CANCELLED"
    assert cluster.job(job)["Restarts"] == "1"
