"""Workspaces and padding of a GPU's kernels (tests/nullgpu/test_trains.py compares whole runs with
the real allocator)."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from launcher.forecast.trace.blocks import trace_micro_batch
from launcher.forecast.trace.events import Allocated, Compute, TraceRequest
from launcher.forecast.trace.workspaces import workspace_bytes, workspaces
from launcher.model.config import ModelConfig
from launcher.model.sizes import named

ATEN = torch.ops.aten
SCORES = torch.zeros(2, 3, 8, 8, dtype=torch.bfloat16)
SEQ_LEN, MICRO_BATCH, HEADS = 64, 2, 3


def taken(operator: Any, *args: Any) -> list[int]:
    compute = Compute(device_type="cuda", heads_apart=True)
    found: list[Tensor] = workspaces(operator, args, partial(workspace_bytes, compute=compute))
    return [each.nbytes for each in found]


def test_softmax_multiplies_before_its_backward() -> None:
    operator = ATEN._softmax_backward_data.default
    assert taken(operator, SCORES, SCORES, -1, torch.bfloat16) == [SCORES.nbytes]


def test_masked_rows_are_looked_for_after_a_softmax() -> None:
    assert taken(ATEN._safe_softmax.default, SCORES, -1) == [SCORES.nbytes, SCORES.numel()]


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "size_bytes"),
    [
        # torch's own record of runs' memory on a GPU that computes nothing: gpt2, llama-3.2-1b
        (4096, 50_257, 768, [13_839_360]),
        (32_768, 128_256, 2048, [295_272_448]),
        (3072, 50_257, 768, []),
        (32_768, 260, 768, [10_862_592]),
    ],
)
def test_an_embedding_adds_up_the_gradients_of_many_tokens(
    tokens: int, rows: int, columns: int, size_bytes: list[int]
) -> None:
    with FakeTensorMode():
        gradient, ids = torch.empty(tokens, columns), torch.empty(tokens, dtype=torch.int64)
        operator = ATEN.embedding_dense_backward.default
        assert taken(operator, gradient, ids, rows, -1, False) == size_bytes


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_flash_attention_has_gradients_of_shared_keys_for_each_head(kv_heads: int) -> None:
    queries = torch.empty(2, 4, 8, 16, dtype=torch.bfloat16)
    keys = torch.empty(2, kv_heads, 8, 16, dtype=torch.bfloat16)
    operator = ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
    fp32 = [2 * queries.nbytes, 4 * 2 * 4 * 8]
    of_keys_and_values = [] if kv_heads == 4 else 2 * [queries.nbytes]
    assert taken(operator, queries, queries, keys, keys) == fp32 + of_keys_and_values


def test_other_operators_take_nothing() -> None:
    assert taken(ATEN.mul.Tensor, SCORES, SCORES) == []


@pytest.mark.parametrize(
    ("dtype", "head_size", "window", "fused"),
    [
        (torch.float32, 12, None, True),
        (torch.float32, 10, None, False),
        (torch.bfloat16, 10, None, True),  # FlashAttention pads heads
        (torch.bfloat16, 16, 5, True),
        (torch.bfloat16, 12, 5, False),  # and takes no mask
    ],
)
def test_all_scores_are_kept_where_no_kernel_fuses_attention(
    dtype: torch.dtype, head_size: int, window: int | None, fused: bool
) -> None:
    width = HEADS * head_size
    small = named("nano", d_model=width, heads=HEADS, vocab_size=300, context=SEQ_LEN, layers=2)
    model = replace(small, window=window, attention="sdpa")
    compute = Compute(device_type="cuda", params_dtype=dtype)
    scores_bytes = MICRO_BATCH * HEADS * SEQ_LEN**2 * 4  # in fp32 whatever the type
    assert (scores_bytes not in allocated(model, compute)) == fused


@pytest.mark.parametrize(("dtype", "padded"), [(torch.bfloat16, True), (torch.float32, False)])
def test_heads_are_padded_for_flash_attention(dtype: torch.dtype, padded: bool) -> None:
    small = named("nano", d_model=HEADS * 12, heads=HEADS, vocab_size=300, context=SEQ_LEN)
    compute = Compute(device_type="cuda", params_dtype=dtype)
    padded_bytes = MICRO_BATCH * HEADS * SEQ_LEN * 16 * dtype.itemsize
    sizes = allocated(small, compute)
    assert (padded_bytes in sizes) == padded
    if padded:  # queries, keys and values of each block
        assert sizes.count(padded_bytes) >= 3 * small.layers


def allocated(model: ModelConfig, compute: Compute) -> list[int]:
    trace = trace_micro_batch(
        TraceRequest(model, compute, micro_batch=MICRO_BATCH, seq_len=SEQ_LEN)
    )
    every = (event for _, events in trace.forward for event in events)
    return [event.size_bytes for event in every if isinstance(event, Allocated)]
