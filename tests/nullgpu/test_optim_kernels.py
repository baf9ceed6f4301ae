"""The kernel of LowPrecisionAdamW: what it computes, in Triton's interpreter."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from nullgpu.runs import ROOT
from optim_kernel_cases import CASES, assert_rounded_alike


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, int], Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "tests/optim_kernel_cases.py"],  # of masked elements' NaN
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = map(json.loads, done.stdout.splitlines())
    return {(line["case"], line["elements"]): line["found"] for line in lines}


@pytest.mark.parametrize(("name", "elements"), CASES)
def test_an_update_is_torchs_own(
    name: str, elements: int, results: dict[tuple[str, int], Any]
) -> None:
    assert_rounded_alike(results[name, elements])
