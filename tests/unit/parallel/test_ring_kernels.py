"""The operators behind ring attention on GPUs, as far as tensors without memory can tell."""

import pytest
import torch

from launcher.parallel.context.ring import _attend, _attend_backward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("queries", "keys", "causal"), [(40, 40, True), (20, 40, False)])
def test_operators_of_gpus_take_what_they_are_given(
    queries: int, keys: int, causal: bool, dtype: torch.dtype
) -> None:
    q = torch.empty(2, 6, queries, 16, dtype=dtype, device="meta")
    k, v = torch.empty(2, 2, 2, keys, 16, dtype=dtype, device="meta")
    out, lse = _attend(q, k, v, causal)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    dq, dk, dv = _attend_backward(out, q, k, v, out, lse, causal)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
