"""`--micro-batch auto` under a real memory limit: the largest that runs, and nothing left of the
search."""

import json
import re
from pathlib import Path

import psutil
import pytest
import torch
from harness import MODEL_FLAGS, python, torchrun, write_text

TRIED = re.compile(r"shardscale: micro-batch (\d+): (fits|out of memory)")
FLAGS = (*MODEL_FLAGS, "--context=64", "--d-model=128", "--report-to=none")

ROPE = ("--position=rope", "--norm=rms", "--activation=swiglu", "--kv-heads=2", "--d-ff=256")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


def bounds(stderr: str) -> tuple[int, int]:
    """The largest micro-batch that has run, and the smallest that has not."""
    tried = {int(size): outcome for size, outcome in TRIED.findall(stderr)}
    fits = [size for size, outcome in tried.items() if outcome == "fits"]
    fails = [size for size, outcome in tried.items() if outcome != "fits"]
    return max(fits), min(fails)


def processes_left(text: Path) -> list[psutil.Process]:
    """Return the processes of trials with this text: other tests have trials of theirs."""
    commands = ((process, process.info["cmdline"]) for process in psutil.process_iter(["cmdline"]))
    trial = {"launcher.probe", f"--data={text}"}
    return [process for process, command in commands if trial <= set(command or [])]


def test_one_process_finds_the_largest_within_3_percent(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    config = tmp_path / "run.yaml"
    # Ten steps: a process still grows a little after the two of a trial.
    config.write_text("micro_batch: auto\nmemory_limit: 32MiB\nsteps: 10\n")
    out = tmp_path / "run"
    done = python(
        *("-m", "launcher.train", *FLAGS, f"--data={text}", f"--config={config}", f"--out={out}"),
        SHARDSCALE_CACHE=str(tmp_path / "cache"),
    )
    assert done.returncode == 0, done.stderr
    largest, too_large = bounds(done.stderr)
    assert too_large - 1 <= 1.03 * largest
    assert f"10 steps of {largest} x 64 tokens" in done.stdout
    assert not list(tmp_path.glob("shardscale-trials-*"))
    assert processes_left(text) == []


# There autograd starts 8 threads for FSDP's backward, whose stacks count as 8 MiB each.
@pytest.mark.skipif(torch.version.cuda is not None, reason="the limit is for torch's CPU build")
def test_ranks_share_a_fixed_global_batch(text: Path, tmp_path: Path) -> None:
    def train(name: str) -> str:
        done = torchrun(
            *(2, "-m", "launcher.train", *FLAGS, *ROPE),
            *(f"--data={text}", f"--out={tmp_path / name}"),
            *("--strategy=fsdp", "--micro-batch=auto", "--global-batch=96"),
            *("--memory-limit=40MiB", "--steps=1"),
            SHARDSCALE_CACHE=str(tmp_path / "cache"),
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    stderr = train("first")
    largest, too_large = bounds(stderr)
    divisors = [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    assert divisors.index(too_large) == divisors.index(largest) + 1
    for rank in (0, 1):
        first_line = (tmp_path / "first" / f"rank{rank}.jsonl").read_text().splitlines()[0]
        record = json.loads(first_line)
        assert record["micro_batch"] == largest
        assert record["global_batch"] == 96
        assert record["accumulation"] == 48 // largest
    stderr = train("second")
    assert not TRIED.search(stderr)
    assert f"--micro-batch auto: {largest}, as found on " in stderr


def test_several_nodes_are_refused() -> None:
    done = python(
        *("-m", "launcher.torchrun", "--nnodes=2", "--node-rank=0", "--master-addr=localhost"),
        *("--nproc=1", "-m", "launcher.train", *FLAGS, "--micro-batch=auto"),
    )
    assert done.returncode == 2
    assert "--micro-batch auto tries sizes on one node, but there are 2" in done.stderr
