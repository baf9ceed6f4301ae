"""Kernels of norms, SwiGLU and the rotary embedding: what they compute, in Triton's interpreter."""

from typing import Any

import pytest
from layer_kernel_cases import CASES, DECODERS, assert_as_torch
from nullgpu.runs import interpreted

from launcher.util.packages import version_of

pytestmark = pytest.mark.skipif(
    (version_of("triton") or "").startswith("3.6.") and (version_of("numpy") or "") >= "2.4",
    reason="Triton 3.6's interpreter runs no loops of these kernels beside NumPy 2.4",
)
Found = dict[tuple[str, str, int], Any]


@pytest.fixture(scope="module")
def results() -> Found:
    lines = interpreted("tests/layer_kernel_cases.py")
    return {tuple(line["case"]): line["found"] for line in lines}


def test_edges_are_torchs(results: Found) -> None:
    assert all(results["edges", "", 0].values()), results["edges", "", 0]


@pytest.mark.parametrize(("kind", "dtype", "width"), CASES)
def test_a_kernel_is_torchs_formula(kind: str, dtype: str, width: int, results: Found) -> None:
    assert_as_torch(dtype, results[kind, dtype, width])


@pytest.mark.parametrize(("shape", "mode"), DECODERS)
def test_a_decoder_has_the_gradients_of_torchs_formulas(
    shape: str, mode: str, results: Found
) -> None:
    assert 0.0 <= results[shape, mode, 0] < 2e-5
