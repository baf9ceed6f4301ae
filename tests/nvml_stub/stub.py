"""Builds the stub of libnvidia-ml.so.1 and runs jobs against it in processes of their own."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

UUIDS = [f"GPU-{n}{n}{n}{n}{n}{n}{n}{n}-0000-0000-0000-00000000000{n}" for n in range(4)]
MIB = 2**20

# A healthy GPU 0: the least a script says, before what a case changes.
HEALTHY = {
    "count": "1",
    "uuid": UUIDS[0],
    "mig_mode": "!3",
    "total": str(80 * 2**30),
    "used": str(1024 * MIB),
    "reserved": str(512 * MIB),
    "gpu_busy": "97",
    "memory_busy": "40",
    "power": "350000",
    "energy": "5000000 5350000 5700000",
    "temperature": "61",
    "pcie_tx": "100",
    "pcie_rx": "200",
}
OF_LIBRARY = ("init", "count", "shutdown")


def script(changes: Mapping[str, str] | None = None) -> str:
    """The script of one GPU, healthy but for the changes."""
    answers = {**HEALTHY, **(changes or {})}
    return "".join(
        f"{'*' if question in OF_LIBRARY else 0} {question} {answer}\n"
        for question, answer in answers.items()
    )


def build_stub(folder: Path, *flags: str) -> Path:
    """Compile libnvidia-ml.so.1 into `folder`, which then goes on LD_LIBRARY_PATH."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to build the stub of NVML with")
    folder.mkdir(parents=True, exist_ok=True)
    name = "libnvidia-ml.so.1"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE"]
    command += [*flags, f"-Wl,-soname,{name}", "-o", str(folder / name), str(HERE / "nvml_stub.c")]
    subprocess.run(command, check=True)
    return folder


def environment(library: Path, **more: str) -> dict[str, str]:
    """Environment in which libnvidia-ml.so.1 is the one in `library`."""
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(library),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        **more,
    }


def run_jobs(library: Path, folder: Path, jobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Run each job of `worker.py` in its own process; results by job name."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = []
    for job in jobs:
        path = folder / f"{job['name']}.script"
        path.write_text(job["script"])
        listed.append({**job, "script": str(path), "result": str(folder / f"{job['name']}.json")})
    (folder / "jobs.json").write_text(json.dumps(listed))
    subprocess.run(
        [sys.executable, str(HERE / "worker.py"), str(folder / "jobs.json")],
        env=environment(library),
        check=True,
        timeout=300,
    )
    return {job["name"]: json.loads(Path(job["result"]).read_text()) for job in listed}
