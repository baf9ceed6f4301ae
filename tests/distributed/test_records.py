"""Nothing that a run has done goes missing: its steps, its model, its reasons; whatever becomes of
its disk, its folder and its reader."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import MODEL_FLAGS, TORCHRUN, environment, torchrun, train, write_text

REFUSED, FAILED, PREEMPTED = 2, 4, 5
SMALL = [*MODEL_FLAGS, "--report-to=none", "--micro-batch=2"]
RANKS_TWO = [str(TORCHRUN), "--nproc", "2", "-m", "launcher.train"]
ALONE = [sys.executable, "-m", "launcher.train"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def long_text(text: Path) -> Path:
    """A test split that takes its time."""
    path = text.with_name("long.txt")
    path.write_text(text.read_text(encoding="utf-8") * 60, encoding="utf-8")
    return path


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        list(command),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            for one in psutil.Process(process.pid).children(recursive=True):
                one.kill()
            process.kill()
        process.communicate()


def wait_until(there: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    while not there():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def steps_of(out: Path, rank: int = 0) -> list[int]:
    lines = (out / f"rank{rank}.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["step"] for record in map(json.loads, lines) if record["kind"] == "step"]


def saved(out: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (out / "checkpoints").glob("step-*"))


def test_a_killed_run_has_the_steps_of_its_checkpoint(text: Path, tmp_path: Path) -> None:
    """Also between two lines of the log, and also the ranks that do not write the log."""
    out = tmp_path / "run"
    command = [*RANKS_TWO, *SMALL, f"--data={text}", f"--out={out}", "--save-every=3"]
    with started([*command, "--steps=1000000", "--log-every=1000000"]) as run:
        wait_until(lambda: len(saved(out)) >= 2, run)
        for process in psutil.Process(run.pid).children(recursive=True):
            process.kill()
        run.communicate()
    reached = saved(out)[-1]
    (out / "rank0 (copy).jsonl").write_bytes((out / "rank0.jsonl").read_bytes())
    done = train(2, *command[5:], f"--steps={reached + 2}", "--resume=auto")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert steps_of(out, rank) == list(range(1, reached + 3))
    assert saved(out)[-1] == reached + 2, "the last step is saved though 3 does not divide it"


def test_a_signal_ends_the_final_test_and_the_next_life_does_only_that(
    long_text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    flags = [*SMALL, f"--data={long_text}", f"--out={out}", "--steps=3", "--test-batches=all"]
    with started([*RANKS_TWO, *flags, "--save-every=0"]) as run:
        wait_until(lambda: status_phase(out) == "test", run)
        run.send_signal(signal.SIGTERM)
        shown, errors = run.communicate()
    assert run.returncode == PREEMPTED, errors
    assert "preempted after step 3" in shown
    assert read(out / "status.json")["state"] == "preempted"
    assert saved(out) == [3], "though nobody wanted it of a run that completes"
    done = train(2, *flags, "--test-batches=5", "--resume=auto")
    assert done.returncode == 0, done.stderr
    assert steps_of(out) == [1, 2, 3]
    assert f"over {5 * 8 * 32:,} of" in done.stdout
    summary = read(out / "summary.json")
    assert (summary["test_tokens"], summary["steps"]) == (5 * 8 * 32, 0)


def status_phase(out: Path) -> str | None:
    path = out / "status.json"
    return str(read(path)["phase"]) if path.exists() else None


def test_max_minutes_bounds_the_final_test_too(long_text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    flags = [*SMALL, f"--data={long_text}", f"--out={out}", "--test-batches=all"]
    done = train(2, *flags, "--steps=1000000", "--max-minutes=0.02")
    assert done.returncode == 0, done.stderr
    summary = read(out / "summary.json")
    assert summary["stopped_by"] == "max_minutes"
    assert 0 < summary["steps"] < 1000000
    assert 0 < summary["test_tokens"] < summary["test_split_tokens"]
    assert summary["perplexity"] > 1
    assert "cut short by --max-minutes" in done.stdout
    assert saved(out) == [summary["steps"]]


def test_no_test_and_no_model_when_nobody_wants_them(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    flags = [*SMALL, f"--data={text}", f"--out={out}", "--steps=2"]
    done = train(1, *flags, "--test-batches=0", "--save-every=0")
    assert done.returncode == 0, done.stderr
    summary = read(out / "summary.json")
    assert (summary["test_loss"], summary["perplexity"], summary["test_tokens"]) == (None, None, 0)
    assert "test loss" not in done.stdout
    assert not (out / "checkpoints").exists()


def test_a_diverged_run_is_a_failure_and_keeps_its_good_checkpoint(
    text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    flags = [*SMALL, f"--data={text}", f"--out={out}", "--save-every=1", "--keep=1"]
    done = train(2, *flags, "--steps=6", "--lr=1e9", "--clip=0")
    assert done.returncode == FAILED
    (said,) = (line for line in done.stderr.splitlines() if line.startswith("shardscale: "))
    assert "training has diverged: the loss is" in said
    assert "--lr" in said
    assert len(said) < 300
    assert "Traceback" not in done.stderr
    assert read(out / "status.json")["state"] == "failed"
    since = int(said.split("from step ")[1].split()[0])
    assert saved(out) == [since - 1]


@pytest.mark.parametrize(
    ("command", "how"),
    [
        (RANKS_TWO, "{} 2>&1 | head -2"),
        (ALONE, "{} >&- 2>&-"),
        (RANKS_TWO, "{} >/dev/full 2>/dev/full"),
    ],
    ids=["head", "closed", "full"],
)
def test_it_does_not_matter_who_reads(
    how: str, command: list[str], text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    flags = [*SMALL, f"--data={text}", f"--out={out}", "--steps=20", "--log-every=1"]
    line = how.format(f"({' '.join([*command, *flags])}; echo $? >{tmp_path / 'code'})")
    subprocess.run(["bash", "-c", line], env=environment(), check=False, stdout=subprocess.PIPE)
    assert (tmp_path / "code").read_text() == "0\n"
    assert read(out / "status.json")["state"] == "completed"
    assert steps_of(out) == list(range(1, 21))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 2 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path) -> None:
    with (disk / "ballast").open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                return


@pytest.mark.parametrize(
    ("command", "again"), [(RANKS_TWO, False), (ALONE, True)], ids=["no-room", "room-again"]
)
def test_a_full_disk_ends_no_training(
    again: bool, command: list[str], text: Path, tmp_path: Path, small_disk: Path
) -> None:
    out = small_disk / "run"
    flags = [*SMALL, f"--data={text}", f"--out={out}", "--log-every=1", "--save-every=0"]
    with started([*command, *flags, "--steps=1000000", "--max-minutes=0.15"]) as run:
        wait_until(lambda: status_phase(out) == "train", run)
        fill(small_disk)
        assert run.stderr is not None
        line = next(line for line in run.stderr if line.startswith("shardscale: "))
        assert "No space left on device" in line
        assert "wait in memory" in line
        if again:
            (small_disk / "ballast").unlink()
        shown, errors = run.communicate()
    assert "Traceback" not in errors
    if again:
        assert run.returncode == 0, errors
        assert steps_of(out) == list(range(1, read(out / "summary.json")["steps"] + 1))
        assert read(out / "status.json")["state"] == "completed"
    else:
        assert run.returncode == FAILED, shown
        assert "records are missing there" in errors
        assert "the run is failed" in errors, "status.json could not say so"


def test_a_full_disk_is_refused_before_anything_is_made(
    text: Path, small_disk: Path, tmp_path: Path
) -> None:
    fill(small_disk)
    out = small_disk / "run"
    flags = [*SMALL, f"--data={text}", "--steps=2", f"--out={out}"]
    for more, why in (([], "No space"), (["--save-every=0"], "No space")):
        done = torchrun(2, "-m", "launcher.train", *flags, *more)
        assert done.returncode == REFUSED, done.stderr
        (said,) = done.stderr.splitlines()
        assert said.startswith(f"shardscale: --out {out}: ")
        assert why in said
        assert not out.exists()
