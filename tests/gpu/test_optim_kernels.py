"""The kernel of LowPrecisionAdamW, compiled. Skipped without a GPU."""

import pytest
import torch
from optim_kernel_cases import CASES, assert_rounded_alike, compared

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


@pytest.mark.parametrize(("name", "elements"), CASES)
def test_an_update_is_that_of_the_cpu(name: str, elements: int) -> None:
    assert_rounded_alike(compared(name, elements, "cuda"))
