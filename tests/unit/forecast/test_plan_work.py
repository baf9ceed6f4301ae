"""Work that is read off a trace is that of the operators that torch dispatches."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.config.resolve import Resolved, resolve
from launcher.config.schema import RunConfig
from launcher.forecast.trace.blocks import micro_batch_work, pass_work
from launcher.forecast.trace.counting import work_of_call
from launcher.forecast.trace.events import Compute, Place, TraceRequest
from launcher.forecast.trace.micro_batches import work_of
from launcher.forecast.trace.record import record_trace
from launcher.forecast.trace.template import segment_work
from launcher.forecast.trace.work import Product, Work
from launcher.forecast.work import passes_work
from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT
from launcher.model.layers import norm
from launcher.model.sizes import named
from launcher.parallel.mesh import WHOLE_MODEL, ContextRank, ModelParallelRank, TensorRank

SMALL: dict[str, Any] = {
    **{"layers": 2, "d_model": 32, "heads": 4, "vocab_size": 64, "context": 16, "micro_batch": 2},
}
LLAMA: dict[str, Any] = {
    **{"position": "rope", "norm": "rms", "activation": "swiglu", "kv_heads": 2, "d_ff": 48},
    **{"bias": "none", "tied": False},
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2 without biases": {"bias": "none"},
    "llama": LLAMA,
    "qwen2": {**LLAMA, "bias": "qkv"},
    "qwen3": {**LLAMA, "qk_norm": True, "head_dim": 12, "tied": True},
}


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        return func(*args, **(kwargs or {}))


def run_of(device_type: str = "cpu", **changes: Any) -> Resolved:
    config = RunConfig().replace(**{**SMALL, **changes})
    return resolve(config, world_size=1, device_type=device_type)


def counted(run: Resolved) -> tuple[int, int]:
    module = GPT(run.model)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with Count() as count:
        loss = module(tokens, tokens)
        forward = count.operators
        (loss * 1.0).backward()
    return forward, count.operators - forward


def operators(run: Resolved) -> tuple[float, float]:
    forward, backward = passes_work(run)
    return forward.operators, backward.operators


@pytest.mark.parametrize("mode", ["none", "selective", "full", "keep=qkv"])
@pytest.mark.parametrize("model", MODELS)
def test_operators_are_those_that_are_dispatched(model: str, mode: str) -> None:
    run = run_of(**MODELS[model], activation_checkpointing=mode)
    assert operators(run) == counted(run)


@pytest.mark.parametrize(
    "adapters",
    [
        {"lora_targets": "all", "lora_dropout": 0.1},
        {"quantize_base": "nf4", "d_model": 64, "d_ff": 128, "head_dim": 16},
    ],
)
@pytest.mark.parametrize("mode", ["none", "full"])
def test_operators_beside_frozen_weights(mode: str, adapters: dict[str, Any]) -> None:
    run = run_of(**{**LLAMA, **adapters}, lora_rank=2, activation_checkpointing=mode)
    assert operators(run) == counted(run)


@pytest.mark.parametrize("mlp_tile", [64, 16, 5])
def test_operators_of_tiles(mlp_tile: int) -> None:
    for mode in ("none", "selective", "full"):
        run = run_of(activation_checkpointing=mode, mlp_tile=mlp_tile)
        assert operators(run) == counted(run)


def test_frozen_weights_have_no_gradients() -> None:
    whole, adapters = run_of(loss_chunk=0), run_of(loss_chunk=0, lora_rank=2)
    tokens = 2 * 16
    for run, backward in ((whole, 2), (adapters, 1)):
        works = passes_work(run)
        frozen_or_not = 2 * tokens * run.model.matmul_parameter_count
        # The three adapters of qkv are one product with zeros between their blocks.
        zeros = 0 if run.model.lora is None else 2 * 2 * 3 * 32
        further = 2 * tokens * run.model.layers * (run.model.block_adapter_count + zeros)
        # The input of the first block has no gradient where weights are frozen.
        spared = 0 if run.model.lora is None else 2 * tokens * 32 * (3 * 32 + 3 * 2)
        assert works[0].matmul_flops == pytest.approx(frozen_or_not + further, rel=0.01)
        assert works[1].matmul_flops == pytest.approx(
            backward * frozen_or_not + 2 * further - spared, rel=0.02
        )


def test_products_of_adapters_are_computed_once_more_where_they_are_not_kept() -> None:
    qkv, proj, up = 32 * 96, 32 * 32, 32 * 128
    tokens, rank = 2 * 16, 2

    def again(word: str) -> float:
        flops = [
            micro_batch_work(TraceRequest(run.model, Compute(), micro_batch=2, seq_len=16))[
                Place("block_backward", 1)
            ].matmul_flops
            for run in (
                run_of(lora_rank=rank, lora_targets="qkv", activation_checkpointing=mode)
                for mode in (word, "none")
            )
        ]
        return (flops[0] - flops[1]) / (2 * tokens)

    assert again("selective") == 0
    # The three adapters' second products are one with zeros between their blocks.
    assert again("keep=proj,mlp-up") == qkv + 3 * rank * (32 + 96)
    assert again("full") == qkv + proj + up + 3 * rank * (32 + 96)


def test_a_gpu_has_one_kernel_for_each_norm() -> None:
    flags = {"norm": "rms", "precision": "fp32"}
    gpu, cpu = (passes_work(run_of(device, **flags))[0] for device in ("cuda", "cpu"))
    norms = 2 * 2 + 1
    assert gpu.kernels < cpu.kernels - 4 * norms
    assert gpu.elementwise_bytes < cpu.elementwise_bytes


def test_bytes_of_an_operator() -> None:
    x, y = torch.ones(8, 4), torch.ones(8, 4)
    table, numbers = torch.ones(1000, 4), torch.zeros(8, dtype=torch.int64)
    cases: list[tuple[Any, float, float]] = [
        (lambda: x + y, 3 * 128, 0),
        (lambda: x.add_(y), 3 * 128, 0),
        (lambda: x.mul_(2.0), 2 * 128, 0),
        (lambda: x.copy_(y), 0, 2 * 128),
        (lambda: x.bfloat16(), 0, 128 + 64),
        (lambda: x.zero_(), 0, 128),
        (lambda: x.view(4, 8).t(), 0, 0),
        (lambda: torch.empty(8), 0, 0),
        (lambda: torch.mul(x, y, out=y), 3 * 128, 0),
        (lambda: torch.nn.functional.embedding(numbers, table), 2 * 128, 0),
    ]
    for call, elementwise, copied in cases:
        work = work_of_call(call)
        assert (work.elementwise_bytes, work.copied_bytes) == (elementwise, copied)
    product = work_of_call(lambda: torch.addmm(torch.ones(4), x, x.t() @ y))
    assert product.products == {Product(1, 4, 4, 8, 4): 1, Product(1, 8, 4, 4, 4): 1}


def test_autocast_adds_casts_of_weights() -> None:
    module = norm(run_of().model)
    x = torch.zeros(2, 16, 32, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        work = work_of_call(lambda: module(x))
    assert work.copied_bytes == 6 * sum(p.numel() for p in module.parameters())


SEQ_LEN = 64
QWEN3 = {
    **{"kv_heads": 2, "head_dim": 10, "position": "rope", "norm": "rms", "qk_norm": True},
    **{"activation": "swiglu", "d_ff": 40, "bias": "none"},
}
GPU = Compute(device_type="cuda", params_dtype=torch.bfloat16)
CASES: dict[str, tuple[dict[str, Any], Compute, ModelParallelRank]] = {
    "gpt2": ({}, GPU, WHOLE_MODEL),
    "qwen3": (QWEN3, GPU, WHOLE_MODEL),
    "cpu": ({}, Compute(), WHOLE_MODEL),
    "autocast": ({}, replace(GPU, params_dtype=torch.float32, autocast=True), WHOLE_MODEL),
    "full": ({"activation_checkpointing": "full"}, GPU, WHOLE_MODEL),
    "selective": ({"activation_checkpointing": "selective"}, GPU, WHOLE_MODEL),
    "eager": ({"attention": "eager", "dropout": 0.1}, GPU, WHOLE_MODEL),
    "whole loss": ({"loss_chunk": 0}, GPU, WHOLE_MODEL),
    "one chunk": ({"loss_chunk": 4096}, GPU, WHOLE_MODEL),
    "two chunks": ({"loss_chunk": 200}, GPU, WHOLE_MODEL),
    "fp8": ({"d_ff": 64}, replace(GPU, fp8=True), WHOLE_MODEL),
    "stage 3": ({}, replace(GPU, stage3=True), WHOLE_MODEL),
    "ring": ({}, GPU, ModelParallelRank(context=ContextRank(size=2, index=1, method="ring"))),
    "tensor": ({}, GPU, ModelParallelRank(tensor=TensorRank(size=2, index=1))),
    "tiles": ({"mlp_tile": 40}, GPU, WHOLE_MODEL),
    "tiles, recomputed": ({"mlp_tile": 40, "activation_checkpointing": "full"}, GPU, WHOLE_MODEL),
    "one tile": ({"mlp_tile": 4096}, GPU, WHOLE_MODEL),
}


def model_of(**changes: Any) -> ModelConfig:
    return named("nano", d_model=48, heads=4, vocab_size=300, context=256, layers=5, **changes)


def plain(work: Work) -> tuple[object, ...]:
    products = {product: times for product, times in work.products.items() if times}
    return products, work.attention_flops, work.elementwise_bytes, work.copied_bytes


@pytest.mark.parametrize("case", CASES)
def test_work_of_a_template_is_that_of_a_recording(case: str) -> None:
    changes, compute, rank = CASES[case]
    model = model_of(**changes)
    where = TraceRequest(model, compute, 5, SEQ_LEN, rank)
    recorded = record_trace(where, lambda *_: 0, passed_rows=0)
    expected = segment_work(recorded.works, recorded.chunks)
    found = work_of(where)
    assert found.keys() == expected.keys()
    for place, work in found.items():
        assert plain(work) == plain(expected[place]), place
        # A slice that is the whole tensor is no operator.
        assert work.operators == pytest.approx(expected[place].operators, abs=4)


@pytest.mark.parametrize("words", ["none", "full", "none:2/selective:3"])
def test_work_of_deep_models_is_put_together(words: str) -> None:
    model = model_of(activation_checkpointing=words)
    forward, backward = pass_work(TraceRequest(model, GPU, micro_batch=5, seq_len=SEQ_LEN))
    recorded = record_trace(TraceRequest(model, GPU, 5, SEQ_LEN), lambda *_: 0)
    expected = segment_work(recorded.works, recorded.chunks)
    for work, backwards in ((forward, False), (backward, True)):
        segments = [w for p, w in expected.items() if p.part.endswith("backward") == backwards]
        assert work.operators == pytest.approx(sum(w.operators for w in segments), abs=4)
        assert work.matmul_flops == sum(each.matmul_flops for each in segments)
        assert work.elementwise_bytes == sum(each.elementwise_bytes for each in segments)
