"""Norms, SwiGLU and the rotary embedding, compiled. Skipped without a GPU."""

import pytest
import torch
from layer_kernel_cases import CASES, assert_as_torch, compared, edges

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


@pytest.mark.parametrize(("kind", "dtype", "width"), CASES)
def test_a_kernel_is_torchs_formula(kind: str, dtype: str, width: int) -> None:
    # Twice: compiled, and then launched as what was compiled.
    for _ in range(2):
        assert_as_torch(dtype, compared(kind, dtype, width, "cuda"))


def test_edges_are_torchs() -> None:
    found = edges("cuda")
    assert all(found.values()), found
