"""A trace that was recorded once says of every micro-batch what a recording of it says."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from trace_levels import levels

from launcher.forecast.trace import micro_batches, repeats
from launcher.forecast.trace.blocks import _expanded
from launcher.forecast.trace.events import Compute, Place, Trace, TraceRequest
from launcher.forecast.trace.micro_batches import trace_of, work_of
from launcher.forecast.trace.record import record_trace
from launcher.forecast.trace.workspaces import workspace_bytes
from launcher.model.config import ModelConfig
from launcher.model.lora_config import Lora
from launcher.model.sizes import named
from launcher.parallel.mesh import WHOLE_MODEL, ContextRank, ModelParallelRank, TensorRank

SEQ_LEN = 64
THREADS = 108 * 2048  # of an A100
GPU = Compute(device_type="cuda", resident_threads=THREADS)
LLAMA: dict[str, Any] = {
    **{"position": "rope", "norm": "rms", "activation": "swiglu", "kv_heads": 2, "tied": False},
    **{"bias": "none"},
}
CASES: dict[str, tuple[dict[str, Any], Compute, ModelParallelRank]] = {
    "gpt2": ({}, GPU, WHOLE_MODEL),
    "autocast": (LLAMA, replace(GPU, autocast=True), WHOLE_MODEL),
    "vocabulary-that-is-a-prime": ({"vocab_size": 65_537, "loss_chunk": None}, GPU, WHOLE_MODEL),
    "padded-head": ({"vocab_size": 301}, replace(GPU, autocast=True), WHOLE_MODEL),
    "stage3": (LLAMA, replace(GPU, stage3=True, params_dtype=torch.bfloat16), WHOLE_MODEL),
    "full": ({"activation_checkpointing": "full"}, GPU, WHOLE_MODEL),
    "selective": ({"activation_checkpointing": "selective"}, GPU, WHOLE_MODEL),
    "eager": ({"attention": "eager", "dropout": 0.1}, GPU, WHOLE_MODEL),
    "math": ({"sdpa_backend": "math"}, GPU, WHOLE_MODEL),
    "whole-logits": ({"loss_chunk": 0}, GPU, WHOLE_MODEL),
    "compiled": (LLAMA, replace(GPU, autocast=True, compiled=True), WHOLE_MODEL),
    "compiled-full": (
        {"activation_checkpointing": "full"},
        replace(GPU, params_dtype=torch.bfloat16, compiled=True),
        WHOLE_MODEL,
    ),
    "tiles": ({"mlp_tile": 40}, GPU, WHOLE_MODEL),
    "adapters": (
        LLAMA | {"lora": Lora(rank=3, alpha=6, targets=("qkv", "proj"))},
        replace(GPU, frozen_dtype=torch.bfloat16),
        WHOLE_MODEL,
    ),
    "ulysses": (
        LLAMA,
        GPU,
        ModelParallelRank(context=ContextRank(size=2, index=1, method="ulysses")),
    ),
    "ring": (
        LLAMA,
        GPU,
        ModelParallelRank(context=ContextRank(size=2, index=1, method="ring")),
    ),
    "matrices": (
        LLAMA,
        replace(GPU, autocast=True),
        ModelParallelRank(tensor=TensorRank(size=2, index=1)),
    ),
}


def model_of(**changes: Any) -> ModelConfig:
    small = named("nano", d_model=32, heads=4, vocab_size=304, context=128, layers=2)
    return replace(small, **{"loss_chunk": 132} | changes)


@pytest.mark.parametrize("case", CASES)
def test_every_micro_batch_is_as_recorded(case: str) -> None:
    changes, compute, rank = CASES[case]
    model = model_of(**changes)
    sums = partial(workspace_bytes, compute=GPU)
    # One chunk of the loss, two and four; compiled code has no part in the loss.
    for micro_batch in (1, 7) if compute.compiled else (1, 3, 7):
        where = TraceRequest(model, compute, micro_batch, SEQ_LEN, rank)
        found, expected = (
            levels(_expanded(trace, range(model.layers), range(model.layers)))
            for trace in (trace_of(where), record_trace(where, sums))
        )
        assert found == expected, micro_batch


@pytest.mark.parametrize("compiled", [False, True])
def test_one_recording_serves_all(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = []

    def record(*arguments: Any, passed_rows: int) -> Trace:
        recorded.append(arguments)
        return record_trace(*arguments, passed_rows=passed_rows)

    monkeypatch.setattr(micro_batches, "record_trace", record)
    model = model_of(layers=4)  # which no other test has recorded
    for micro_batch in (1, 7, 500_000):
        compute = replace(GPU, compiled=compiled)
        trace = trace_of(TraceRequest(model, compute, micro_batch, SEQ_LEN))
        block_input = 4 * micro_batch * SEQ_LEN * model.d_model
        assert block_input in {life.size_bytes for life in trace.lifetimes}
    assert len(recorded) == 1


@pytest.mark.parametrize("seq_len", [131_071, 131_072])  # a prime, and none
def test_a_long_sequence_is_as_recorded(seq_len: int) -> None:
    model = model_of(context=seq_len, loss_chunk=None)
    where = TraceRequest(model, GPU, 3, seq_len)
    sums = partial(workspace_bytes, compute=GPU)
    found, expected = (
        levels(_expanded(trace, range(model.layers), range(model.layers)))
        for trace in (trace_of(where), record_trace(where, sums))
    )
    assert found == expected


def test_work_of_tiles_of_a_long_sequence_is_recorded() -> None:
    """With tiles of more tokens than any dimension of a model has."""
    model = model_of(context=131_072, mlp_tile=10_000, loss_chunk=None)
    whole = replace(model, mlp_tile=None)
    tiled, untiled = (work_of(TraceRequest(each, GPU, 3, 131_072)) for each in (model, whole))
    block = Place("block", 0)
    assert tiled[block].operators > untiled[block].operators


def test_scores_beyond_64_bits_are_recorded_for_each_micro_batch() -> None:
    seq_len = 65_536  # of one of 64 ranks, each with one head and all keys
    model = model_of(context=seq_len, heads=64, d_model=64, attention="eager")
    rank = ModelParallelRank(context=ContextRank(size=64, index=1, method="ulysses"))
    trace = trace_of(TraceRequest(model, GPU, 2, seq_len, rank))
    scores_bytes = 4 * 2 * (64 * seq_len) ** 2
    assert scores_bytes in {life.size_bytes for life in trace.lifetimes}


@pytest.mark.parametrize("rank", [WHOLE_MODEL, CASES["matrices"][2]], ids=["whole", "matrices"])
@pytest.mark.parametrize("compute", [GPU, Compute(device_type="cpu")], ids=["cuda", "cpu"])
def test_of_many_chunks_of_the_loss_three_are_recorded(
    rank: ModelParallelRank, compute: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = partial(workspace_bytes, compute=GPU)

    def recorded(chunk: int) -> Trace:
        return record_trace(
            TraceRequest(model_of(loss_chunk=chunk), compute, 3, SEQ_LEN, rank), sums
        )

    few = recorded(10)
    monkeypatch.setattr(repeats, "CHUNKS", 1000)
    every = recorded(10)
    assert len(every.lifetimes) > len(few.lifetimes)
    found, expected = (levels(_expanded(trace, range(2), range(2))) for trace in (few, every))
    assert max(found) == max(expected)
