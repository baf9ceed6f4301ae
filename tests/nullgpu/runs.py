"""Runs the launcher on the null GPU, each command in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.measure.hardware import gpu_named
from launcher.tools.rehearse.null_gpu import environment as null_gpu

ROOT = Path(__file__).parents[2]
MIB = 2**20
GPU = gpu_named("h200")

# Losses are 0 and so are gradients, which nothing here minds.
SHORT = (
    *("--device", "cuda", "--data", str(ROOT / "README.md"), "--tokenizer", "byte"),
    *("--steps", "4", "--report-to=none"),
    *("--test-batches", "2"),
)
TINY = (
    *("--layers", "2", "--d-model", "128", "--heads", "2", "--context", "64"),
    *("--micro-batch", "4"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A command that has ended: its exit code, its output, and the folder of its records."""

    code: int
    output: str
    folder: Path

    def json(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / name).read_text())
        return content

    def records(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "rank0.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]


def environment(
    folder: Path,
    more: Mapping[str, str] | None = None,
    *,
    python: str = sys.executable,
    gpus: int = 1,
) -> dict[str, str]:
    """In which every program of `python` sees that many null GPUs, each as an H200."""
    folder.mkdir(exist_ok=True)
    return {
        **os.environ,
        **null_gpu(python, [GPU] * gpus),
        "SHARDSCALE_NULL_GPU_CHECKS": "true",  # ours ask whether a step is finite
        # What a run caches stays in the test.
        "XDG_CACHE_HOME": str(folder / "cache"),
        **(more or {}),
    }


def command(folder: Path, *words: str, more: Mapping[str, str] | None = None, gpus: int = 1) -> Run:
    """`python -m` with the words; a run's folder is `folder`/run."""
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env=environment(folder, more, gpus=gpus),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    return Run(code=done.returncode, output=done.stdout, folder=folder / "run")


def interpreted(script: str) -> list[dict[str, Any]]:
    """The lines of JSON that a script prints whose kernels Triton's interpreter runs on the CPU."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script],  # of masked elements' NaN
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def train(
    folder: Path,
    *flags: str,
    tiny: bool = True,
    more: Mapping[str, str] | None = None,
    gpus: int = 1,
) -> Run:
    """Train the tiny model, or the one that the flags name; the last of two equal flags counts."""
    about = (*SHORT, *(TINY if tiny else ()), "--out", str(folder / "run"))
    return command(folder, "launcher.train", *about, *flags, more=more, gpus=gpus)
