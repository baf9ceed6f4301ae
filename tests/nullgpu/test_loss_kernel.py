"""The kernel of the fused loss: what it computes, in Triton's interpreter."""

import json
import os
import subprocess
import sys

import pytest
from loss_kernel_cases import CASES, assert_as_torch
from nullgpu.runs import ROOT

Found = dict[tuple[str, int], dict[str, float]]


@pytest.fixture(scope="module")
def results() -> Found:
    done = subprocess.run(
        [sys.executable, "tests/loss_kernel_cases.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = map(json.loads, done.stdout.splitlines())
    return {(line["case"], line["size"]): line["found"] for line in lines}


@pytest.mark.parametrize(("dtype", "size"), CASES)
def test_a_chunk_is_torchs_own(dtype: str, size: int, results: Found) -> None:
    assert_as_torch(dtype, results[dtype, size])
