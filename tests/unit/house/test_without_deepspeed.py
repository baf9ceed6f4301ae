"""A machine on which everything is installed but DeepSpeed."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
FIX = "--strategy zero needs deepspeed, which is not installed: pip install 'deepspeed>=0.19'"
# Python's own finder of modules and of what is installed, less one name.
HIDING = """
import sys
from importlib.machinery import PathFinder


class WithoutDeepSpeed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] == "deepspeed"
        return None if hidden else PathFinder.find_spec(name, path, target)

    @staticmethod
    def find_distributions(*context):
        return () if context[0].name == "deepspeed" else PathFinder.find_distributions(*context)


sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutDeepSpeed
"""
TINY = (
    *("--layers", "1", "--d-model", "32", "--heads", "2", "--context", "16", "--steps", "2"),
    *("--data", str(ROOT / "README.md"), "--tokenizer", "byte", "--test-batches", "0"),
)


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(HIDING)
    path = os.pathsep.join((str(folder), str(ROOT)))
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_zero_is_refused_before_anything_starts(tmp_path: Path) -> None:
    train = ("-m", "launcher.train", *TINY, "--zero", "1", "--out", "run")
    for start in ((), ("-m", "launcher.torchrun", "--nproc", "2")):
        done = python(tmp_path, *start, *train)
        assert (done.returncode, done.stderr) == (2, f"shardscale: {FIX}\n")
        assert not (tmp_path / "run").exists()


def test_what_needs_no_deepspeed_trains(tmp_path: Path) -> None:
    done = python(tmp_path, "-m", "launcher.train", *TINY, "--strategy", "fsdp", "--out", "run")
    assert done.returncode == 0, done.stderr


def test_a_plan_leaves_zero_out_and_says_so(tmp_path: Path) -> None:
    plan = ("-m", "launcher", "plan", "--gpus", "2", "--gpu", "H100", *TINY)
    few = ("--precision", "bf16", "--activation-checkpointing", "none", "--micro-batch", "1")
    done = python(tmp_path, *plan, *few)
    assert done.returncode == 0, done.stderr
    assert f"left out: {FIX}" in " ".join(done.stdout.split())
    assert "zero2" not in done.stdout
    assert "fsdp" in done.stdout

    asked = python(tmp_path, *plan, *few, "--zero", "2")
    assert (asked.returncode, asked.stderr) == (2, f"shardscale: {FIX}\n")
