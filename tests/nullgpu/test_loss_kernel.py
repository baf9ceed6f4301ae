"""The kernel of the fused loss: what it computes, in Triton's interpreter."""

import pytest
from loss_kernel_cases import CASES, assert_as_torch
from nullgpu.runs import interpreted

Found = dict[tuple[str, int], dict[str, float]]


@pytest.fixture(scope="module")
def results() -> Found:
    lines = interpreted("tests/loss_kernel_cases.py")
    return {(line["case"], line["size"]): line["found"] for line in lines}


def test_edges_are_torchs_and_what_is_no_token_has_no_loss(results: Found) -> None:
    assert all(results["edges", 0].values()), results["edges", 0]


@pytest.mark.parametrize(("dtype", "size"), CASES)
def test_a_chunk_is_torchs_own(dtype: str, size: int, results: Found) -> None:
    assert_as_torch(dtype, results[dtype, size])
