"""Workspaces and padding of a GPU's kernels (tests/nullgpu/test_trains.py compares whole runs with
the real allocator)."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.forecast.trace.blocks import trace_micro_batch
from launcher.forecast.trace.events import Allocated, Compute
from launcher.forecast.trace.workspaces import workspaces
from launcher.model.config import ModelConfig
from launcher.model.sizes import named

ATEN = torch.ops.aten
SCORES = torch.zeros(2, 3, 8, 8, dtype=torch.bfloat16)
SEQ_LEN, MICRO_BATCH, HEADS = 64, 2, 3


def taken(operator: Any, *args: Any) -> list[int]:
    def no_sums(rows: int, columns: int, element_bytes: int) -> int:
        return 0

    found: list[Tensor] = workspaces(operator, args, no_sums)
    return [each.nbytes for each in found]


def test_softmax_multiplies_before_its_backward() -> None:
    operator = ATEN._softmax_backward_data.default
    assert taken(operator, SCORES, SCORES, -1, torch.bfloat16) == [SCORES.nbytes]


def test_masked_rows_are_looked_for_after_a_softmax() -> None:
    assert taken(ATEN._safe_softmax.default, SCORES, -1) == [SCORES.nbytes, SCORES.numel()]


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
    trace = trace_micro_batch(model, compute, micro_batch=MICRO_BATCH, seq_len=SEQ_LEN)
    every = (event for _, events in trace.forward for event in events)
    return [event.size_bytes for event in every if isinstance(event, Allocated)]
