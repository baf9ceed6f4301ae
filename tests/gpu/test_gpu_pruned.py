"""Pruned weights on a GPU: zeros that stay, and torch's kernels for two of four."""

from pathlib import Path

import pytest
import torch

from launcher.strategies.masks import pack, zero
from launcher.tools.prune.choice import PruneOptions
from launcher.tools.prune.kinds import two_of_four_note
from launcher.tools.prune.weights import importance, kept

pytestmark = pytest.mark.gpu


def two_of_four(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator).cuda()
    options = PruneOptions(run=Path("run"), out=Path("out"), pattern="2:4")
    return weight, kept(importance(weight, None), options)


def test_bits_are_unpacked_on_the_device() -> None:
    weight, mask = two_of_four(96, 64)
    expected = weight * mask
    flat = weight.view(-1)[3:]
    torch.cuda.set_sync_debug_mode("error")  # holding them must not wait for the device
    try:
        zero(flat, pack(mask), skip=3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(flat, expected.view(-1)[3:])


def test_torch_computes_with_two_of_four() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("sparse tensor cores came with compute capability 8.0")
    weight, mask = two_of_four(256, 256)
    dense = (weight * mask).bfloat16()
    inputs = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).cuda().bfloat16()
    sparse = torch.sparse.to_sparse_semi_structured(dense)
    given = torch.nn.functional.linear(inputs, sparse)
    expected = torch.nn.functional.linear(inputs, dense)
    torch.testing.assert_close(given, expected, rtol=2e-2, atol=2e-2)
    assert "to_sparse_semi_structured" in two_of_four_note(torch.device("cuda"))
