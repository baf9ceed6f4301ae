"""The fused loss, compiled. Skipped without a GPU."""

import pytest
import torch
from loss_kernel_cases import CASES, assert_as_torch, compared, edges
from torch import Tensor

from launcher.model.fused import fuses
from launcher.model.loss import linear_cross_entropy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


@pytest.mark.parametrize(("dtype", "size"), CASES)
def test_a_chunk_is_torchs_own(dtype: str, size: int) -> None:
    assert_as_torch(dtype, compared(dtype, size, "cuda"))


def test_edges_are_torchs_and_what_is_no_token_has_no_loss() -> None:
    found = edges("cuda")
    assert all(found.values()), found


def loss_and_gradients(device: str, chunk_rows: int, *, autocast: bool) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 64, generator=draw).to(device).requires_grad_()
    weight = (torch.randn(50257, 64, generator=draw) / 8).to(device).requires_grad_()
    targets = torch.randint(0, 50257, (300,), generator=draw).to(device)
    targets[5:9] = -100
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        x = hidden.bfloat16() if autocast else hidden
        loss = linear_cross_entropy(x, weight, targets, chunk_rows=chunk_rows)
    (loss * 3).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [t.detach().float().cpu() for t in (loss, hidden.grad, weight.grad)]


@pytest.mark.parametrize("autocast", [False, True])
def test_a_padded_vocabulary_in_chunks_gives_the_plain_loss(autocast: bool) -> None:
    assert fuses("cuda")
    exact = loss_and_gradients("cpu", 0, autocast=False)
    found = loss_and_gradients("cuda", 128, autocast=autocast)
    for mine, reference in zip(found, exact, strict=True):
        tolerance = (0.03 if autocast else 1e-4) * float(reference.abs().max())
        torch.testing.assert_close(mine, reference, rtol=0, atol=tolerance)
