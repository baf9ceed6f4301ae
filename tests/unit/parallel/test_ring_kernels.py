"""The operators behind ring attention on GPUs, as far as tensors without memory can tell."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


class _Called(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("kv_heads", [2, 6])
def test_keys_that_no_queries_share_are_not_copied(kv_heads: int) -> None:
    q = torch.empty(2, 6, 40, 16, device="meta")
    k, v = torch.empty(2, 2, kv_heads, 40, 16, device="meta")
    with _Called() as forward:
        out, lse = _attend(q, k, v, True)
    with _Called() as backward:
        _attend_backward(out, q, k, v, out, lse, True)
    shared = kv_heads < 6
    assert ("clone" in forward.names, "sum" in backward.names) == (shared, shared)
