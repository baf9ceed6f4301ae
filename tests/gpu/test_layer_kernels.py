"""Norms, SwiGLU and the rotary embedding, compiled. Skipped without a GPU."""

import pytest
import torch
from layer_kernel_cases import CASES, DECODERS, assert_as_torch, compared, decoder, edges

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


@pytest.mark.parametrize(("shape", "mode"), DECODERS)
def test_a_decoder_has_the_gradients_of_torchs_formulas(shape: str, mode: str) -> None:
    assert decoder(shape, mode, "cuda") < 2e-5
