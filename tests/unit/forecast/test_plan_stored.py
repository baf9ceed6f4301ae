"""Traces that come with the package are those that would be recorded, or are not used."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from trace_levels import levels

from launcher.forecast.trace import stored
from launcher.forecast.trace.blocks import _expanded
from launcher.forecast.trace.events import Compute, TraceRequest
from launcher.forecast.trace.micro_batches import trace_of, work_of
from launcher.forecast.trace.stored import stored_template, stored_trace, stored_work
from launcher.model.casts import MOST_ELEMENTS
from launcher.model.config import ModelConfig
from launcher.model.lora_config import Lora
from launcher.model.products import linear_products
from launcher.model.sizes import named
from launcher.parallel.mesh import WHOLE_MODEL, ContextRank, ModelParallelRank, TensorRank

FP32 = Compute(device_type="cuda", resident_threads=108 * 2048)
AUTOCAST = replace(FP32, autocast=True)
LOW = replace(FP32, params_dtype=torch.bfloat16, frozen_dtype=torch.bfloat16)
LORA = Lora(rank=16, alpha=32.0)


def model_of(name: str, **changes: Any) -> ModelConfig:
    layers = 5 if "lora" in changes else 3  # as many as are traced
    return replace(named(name), **{"layers": layers, "attention": "sdpa", **changes})


CASES = {
    "all weights cast together": (model_of("gpt2"), AUTOCAST, 3, 128),
    "some weights cast apart": (
        model_of("gpt2-xl", activation_checkpointing="selective"),
        AUTOCAST,
        *(1, 1024),
    ),
    # Rotated heads are as many as those of queries and one more.
    "shared key heads": (model_of("llama-3-8b"), replace(LOW, stage3=True), 2, 256),
    "scaled frequencies": (
        model_of("llama-3.1-8b", activation_checkpointing="full"),
        AUTOCAST,
        *(1, 64),
    ),
    "heads that are normalised": (
        model_of("qwen3-0.6b", activation_checkpointing="selective"),
        LOW,
        *(9, 512),
    ),
    "a window": (model_of("mistral-7b", attention="flash"), LOW, 1, 8192),
    "adapters": (model_of("qwen2.5-1.5b", lora=LORA), replace(LOW, stage3=True), 5, 64),
    "a padded vocabulary": (model_of("gpt2", vocab_size=261, lora=LORA), LOW, 64, 64),
    "many chunks of the loss": (model_of("llama-2-7b"), FP32, 40, 2048),
}


@pytest.mark.parametrize("case", CASES)
def test_stored_is_what_would_be_recorded(case: str) -> None:
    where = TraceRequest(*CASES[case])
    trace = stored_trace(where)
    assert trace is not None
    found, expected = (
        levels(_expanded(each, range(each.layers), range(each.layers)))
        for each in (trace, trace_of(where))
    )
    assert found == expected
    assert stored_work(where) == work_of(where)


def test_weights_cast_apart_are_in_the_cases() -> None:
    sizes = [product.weights for product in linear_products(model_of("gpt2-xl"))]
    assert min(sizes) <= MOST_ELEMENTS < max(sizes)


GPT2 = model_of("gpt2")


@pytest.mark.parametrize(
    ("model", "compute", "rank"),
    [
        (replace(GPT2, dropout=0.1), FP32, WHOLE_MODEL),
        (replace(GPT2, loss_chunk=0), FP32, WHOLE_MODEL),
        (replace(GPT2, mlp_tile=64), FP32, WHOLE_MODEL),
        (replace(GPT2, heads=1, kv_heads=1), FP32, WHOLE_MODEL),
        (replace(GPT2, lora=replace(LORA, dropout=0.1)), FP32, WHOLE_MODEL),
        (replace(GPT2, attention="eager"), FP32, WHOLE_MODEL),
        (replace(GPT2, d_model=3 * 2**14), FP32, WHOLE_MODEL),
        (GPT2, replace(LOW, documents=True), WHOLE_MODEL),
        (GPT2, replace(LOW, compiled=True), WHOLE_MODEL),
        (GPT2, replace(LOW, own_kernels=False), WHOLE_MODEL),
        (GPT2, Compute(device_type="cpu"), WHOLE_MODEL),
        (GPT2, FP32, ModelParallelRank(tensor=TensorRank(size=2, index=1))),
        (GPT2, FP32, ModelParallelRank(context=ContextRank(size=2, index=1, method="ring"))),
    ],
)
def test_what_names_and_dimensions_do_not_tell_is_recorded(
    model: ModelConfig, compute: Compute, rank: ModelParallelRank
) -> None:
    assert stored_template(TraceRequest(GPT2, FP32, 1, 64)) is not None
    assert stored_template(TraceRequest(model, compute, 1, 64, rank)) is None


@pytest.mark.parametrize("other", [{"torch": "2.10.0"}, {"sources": "edited"}])
def test_of_another_torch_or_other_sources_is_recorded(
    other: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_today = stored.origin()
    monkeypatch.setattr(stored, "origin", lambda: of_today | other)
    stored._is_of_today.cache_clear()
    try:
        assert stored_template(TraceRequest(GPT2, FP32, 1, 64)) is None
    finally:
        stored._is_of_today.cache_clear()
