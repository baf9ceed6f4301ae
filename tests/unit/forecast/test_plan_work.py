"""The operators that are predicted for a block are those that torch dispatches."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.config.resolve import Resolved, resolve
from launcher.config.schema import RunConfig
from launcher.forecast.moved_bytes import block_bytes, block_elements
from launcher.forecast.work import backward_work, forward_work, recomputed_work
from launcher.model.gpt import GPT, SharedInputs

SMALL: dict[str, Any] = {
    **{"layers": 2, "d_model": 32, "heads": 4, "vocab_size": 64, "context": 16, "micro_batch": 2},
}
LLAMA: dict[str, Any] = {
    **{"position": "rope", "norm": "rms", "activation": "swiglu", "kv_heads": 2, "d_ff": 48},
    **{"attention_bias": False, "mlp_bias": False, "tied": False},
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2 without biases": {"attention_bias": False, "mlp_bias": False},
    "llama": LLAMA,
    "qwen2": {**LLAMA, "qkv_bias": True},
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
        loss.backward()
    return forward, count.operators - forward


@pytest.mark.parametrize("model", MODELS)
def test_operators_are_those_that_are_dispatched(model: str) -> None:
    run = run_of(**MODELS[model])
    assert (forward_work(run).operators, backward_work(run).operators) == counted(run)


@pytest.mark.parametrize("model", MODELS)
def test_recomputed_operators_are_nearly_so(model: str) -> None:
    """Selective checkpointing recomputes a few less than full, by which they are counted."""
    for mode in ("selective", "full"):
        run = run_of(**MODELS[model], activation_checkpointing=mode)
        assert backward_work(run).operators == pytest.approx(counted(run)[1], rel=0.04)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "adapters",
    [
        {},
        {"lora_targets": "all", "lora_dropout": 0.1},
        *(
            {"quantize_base": kind, "d_model": 64, "d_ff": 128, "head_dim": 16}
            for kind in ("nf4", "int8")
        ),
    ],
)
def test_operators_beside_frozen_weights_are_nearly_so(
    model: str, adapters: dict[str, Any]
) -> None:
    for mode in ("none", "selective", "full"):
        run = run_of(**{**MODELS[model], **adapters}, lora_rank=2, activation_checkpointing=mode)
        forward, backward = counted(run)
        assert backward_work(run).operators == pytest.approx(backward, rel=0.06)
        if mode == "none":
            assert forward_work(run).operators == pytest.approx(forward, abs=1)


def test_frozen_weights_have_no_gradients() -> None:
    whole, adapters = run_of(loss_chunk=0), run_of(loss_chunk=0, lora_rank=2)
    tokens = 2 * 16
    for run, backward in ((whole, 2), (adapters, 1)):
        frozen_or_not = 2 * tokens * run.model.matmul_parameter_count
        further = 2 * tokens * run.model.layers * run.model.block_adapter_count
        assert forward_work(run).matmul_flops == frozen_or_not + further
        assert backward_work(run).matmul_flops == backward * frozen_or_not + 2 * further


def test_products_of_adapters_are_computed_once_more_where_they_are_not_kept() -> None:
    qkv, proj, up, down = 32 * 96, 32 * 32, 32 * 128, 128 * 32
    rank, tokens, layers = 2, 2 * 16, 2

    def again(word: str, targets: str) -> float:
        run = run_of(lora_rank=rank, lora_targets=targets)
        return recomputed_work(run, word).matmul_flops / (2 * tokens * layers)

    assert again("selective", "qkv") == rank * 96
    assert again("keep=proj,mlp-up", "qkv") == qkv + rank * (3 * 32 + 96)
    assert again("selective", "all") == rank * (96 + 32 + 128)
    kept_but_mlp_up = rank * (96 + 32) + up + rank * (32 + 128) + down + rank * 128
    assert again("keep=qkv,attention,proj", "all") == kept_but_mlp_up
    adapters = rank * (3 * 32 + 96 + 32 + 32 + 32 + 128 + 128 + 32)
    assert again("full", "all") == qkv + proj + up + down + adapters


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mlp_tile", [64, 16, 5])
def test_operators_of_tiles_are_nearly_so(model: str, mlp_tile: int) -> None:
    for mode in ("none", "selective", "full"):
        run = run_of(**MODELS[model], activation_checkpointing=mode, mlp_tile=mlp_tile)
        predicted = forward_work(run).operators, backward_work(run).operators
        assert predicted == pytest.approx(counted(run), rel=0.1)


def test_a_gpu_has_one_kernel_for_each_norm() -> None:
    gpu, cpu = run_of("cuda", norm="rms"), run_of(norm="rms")
    assert forward_work(gpu).operators == forward_work(run_of("cuda")).operators
    assert forward_work(gpu).operators == forward_work(cpu).operators - 5 * 6
    assert forward_work(gpu).elementwise_bytes < forward_work(cpu).elementwise_bytes


def test_what_a_block_reads_and_writes() -> None:
    gpt2, qwen3 = run_of().model, run_of(**MODELS["qwen3"]).model
    assert block_elements(gpt2, "cpu") == 12 * 32 + 2 * 128
    # 2 norms, 2 sums, the copy of 4 heads of 12, silu and product, 6 heads normed and turned.
    expected = 2 * 2 * 32 + 2 * 3 * 32 + 2 * 48 + 5 * 48 + (2 + 9) * 6 * 12
    assert block_elements(qwen3, "cuda") == expected
    # In bf16 the rotation is in fp32 all the same, between two casts: 48 bytes.
    low = block_elements(qwen3, "cuda", element_bytes=2)
    assert low - expected == (48 // 2 - 9) * 6 * 12
    wider = replace(qwen3, d_model=40)
    assert block_elements(wider, "cuda") - expected == 10 * 8


class Moved(TorchDispatchMode):
    """Bytes that operators read and write, without products, attention and views."""

    def __init__(self) -> None:
        super().__init__()
        self.size_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        views = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if not views and not any(word in name for word in ("mm", "attention", "empty", "_unsafe")):
            tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if torch.is_tensor(leaf)]
            self.size_bytes += sum(tensor.nbytes for tensor in tensors)
        return out


def moved_by_a_block(run: Resolved, *, autocast: bool) -> int:
    module = GPT(run.model)
    if not autocast:
        module.bfloat16()
    shape = torch.Size((2, 16))
    sequences = SharedInputs(shape, None, module.rotation(torch.arange(16)))
    x = torch.zeros(*shape, run.model.d_model, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), Moved() as moved:
        out = module.blocks[0](x, sequences)
    assert out.dtype == torch.bfloat16  # the residual stream
    size_bytes: int = moved.size_bytes
    return size_bytes


@pytest.mark.parametrize("position", ["learned", "rope"])
def test_a_block_under_autocast_moves_its_own_bytes_and_casts_of_weights(position: str) -> None:
    run = run_of("cuda", position=position, precision="bf16", strategy="single")
    copies, under_autocast = (moved_by_a_block(run, autocast=on) for on in (False, True))
    block = GPT(run.model).blocks[0]
    assert under_autocast - copies == 6 * sum(p.numel() for p in block.parameters())
    elements = run.model.layers * 2 * 2 * run.model.attention_dim  # the copy that a CPU spares
    planned = 32 * (block_bytes(run) - elements) / run.model.layers
    assert planned == pytest.approx(copies, rel=0.05)
