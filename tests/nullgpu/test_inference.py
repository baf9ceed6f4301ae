"""`infer-bench` on the null GPU: eager and compiled, with the kernels that CUDA takes."""

import subprocess
import sys
from pathlib import Path

from nullgpu.runs import ROOT, environment


def test_every_engine_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["tests/gpu/test_inference.py", "-k", "memory", "--basetemp", str(tmp_path / "runs")]
    variables = environment(tmp_path / "null-gpu")
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
