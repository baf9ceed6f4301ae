"""The options that make Llama, Qwen and Mistral of the decoder, against plain formulas."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from launcher.model.config import ActivationCheckpointing, AttentionKind, ModelConfig
from launcher.model.gpt import GPT, MLP, initial_value
from launcher.model.layers import rotate, rotation

LLAMA: dict[str, Any] = {
    **{"vocab_size": 97, "context": 16, "layers": 3, "d_model": 24},
    **{"heads": 6, "kv_heads": 2, "position": "rope", "norm": "rms", "activation": "swiglu"},
    **{"bias": "none", "d_ff": 40},
}
QWEN3: dict[str, Any] = {**LLAMA, "head_dim": 10, "qk_norm": True, "norm_eps": 1e-6}
QWEN2: dict[str, Any] = {**LLAMA, "bias": "qkv", "tied": False, "rope_theta": 1e6}
FAMILIES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}


def _model(family: str, **options: Any) -> GPT:
    config = ModelConfig(**{**FAMILIES[family], **options})
    module = GPT(config)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            value = initial_value(name, parameter.shape, config, seed=1, device="cpu")
            parameter.copy_(value * 4 if value.dim() > 1 else value + 0.1 * torch.rand_like(value))
    return module


def _loss_and_gradients(module: GPT) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 97, (2, 17), generator=draw)
    loss = module(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return [loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


def _assert_equal(mine: list[Tensor], reference: list[Tensor], tolerance: float) -> None:
    assert len(mine) == len(reference)
    for a, b in zip(mine, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_agree_on_grouped_queries(family: str, window: int | None) -> None:
    results = []
    kinds: tuple[AttentionKind, ...] = ("eager", "sdpa")
    for kind in kinds:
        results.append(_loss_and_gradients(_model(family, attention=kind, window=window)))
    _assert_equal(results[1], results[0], 2e-5)


def test_grouped_queries_equal_repeated_key_heads() -> None:
    grouped = _model("llama", attention="eager")
    whole = GPT(replace(grouped.config, kv_heads=6, attention="sdpa"))
    state = grouped.state_dict()
    for name in [name for name in state if name.endswith("attn.qkv.weight")]:
        q, k, v = state[name].split([24, 8, 8])
        k, v = (part.view(2, 4, -1).repeat_interleave(3, dim=0).flatten(0, 1) for part in (k, v))
        state[name] = torch.cat((q, k, v))
    whole.load_state_dict(state)
    tokens = torch.randint(0, 97, (2, 16))
    torch.testing.assert_close(whole(tokens), grouped(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_changes_nothing(family: str, mode: ActivationCheckpointing) -> None:
    mine = _loss_and_gradients(_model(family, activation_checkpointing=mode))
    _assert_equal(mine, _loss_and_gradients(_model(family)), 0.0)


def test_a_compiled_block_computes_the_same() -> None:
    """Recomputed ones do in test_compile.py."""
    module = _model("qwen3")
    module.blocks[1].compile(fullgraph=True)
    _assert_equal(_loss_and_gradients(module), _loss_and_gradients(_model("qwen3")), 2e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["bf16", "autocast"])
def test_low_precision_follows_fp32(family: str, precision: str) -> None:
    exact = _loss_and_gradients(_model(family))[0]
    module = _model(family)
    if precision == "bf16":
        module.to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
        loss = _loss_and_gradients(module)[0]
    torch.testing.assert_close(loss.float(), exact, rtol=1e-2, atol=0)


def test_a_rotation_turns_each_pair_by_its_position_times_its_frequency() -> None:
    config = ModelConfig(**LLAMA, rope_theta=100.0)
    x = torch.randn(2, 5, 3, 4)
    turned = rotate(x, rotation(config, torch.arange(5)))
    for position in range(5):
        for pair in range(2):
            angle = position * 100.0 ** (-2 * pair / 4)
            left, right = x[:, position, :, pair], x[:, position, :, pair + 2]
            expected = left * math.cos(angle) - right * math.sin(angle)
            torch.testing.assert_close(turned[:, position, :, pair], expected)


def test_bf16_heads_are_turned_in_fp32() -> None:
    config = ModelConfig(**{**LLAMA, "context": 4096})
    x = torch.randn(1, 4096, 1, 4)
    table = rotation(config, torch.arange(4096))
    assert all(part.dtype == torch.float32 and part.numel() == 4096 * 2 for part in table)
    rounded = x.bfloat16()
    mine, exact = rotate(rounded, table), rotate(rounded.float(), table)
    assert torch.equal(mine, exact.bfloat16())


def test_under_fsdp_every_block_turns_by_the_same_fp32_table() -> None:
    """FSDP casts what a block is called with to the type of its parameters: tensors in tuples and
    in dataclasses, too."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module, tables = _model("llama"), []
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for block in module.blocks:
            fully_shard(block, mp_policy=policy)
            attention = block.get_submodule("attn")
            attention.register_forward_pre_hook(lambda _, args: tables.extend(args[1].rotation))
        fully_shard(module, mp_policy=policy)
        module(torch.zeros(1, 16, dtype=torch.int64))
    finally:
        dist.destroy_process_group()
    assert len(tables) == 2 * 3
    assert {table.dtype for table in tables} == {torch.float32}
    assert len({table.untyped_storage()._cdata for table in tables}) == 2


def test_rms_norm_is_its_formula() -> None:
    norm = _model("llama").ln_f
    assert isinstance(norm, torch.nn.RMSNorm)
    x = torch.randn(3, 24)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)


def test_swiglu_is_its_formula() -> None:
    mlp = _model("llama").get_submodule("blocks.0.mlp")
    assert isinstance(mlp, MLP)
    assert isinstance(mlp.fc, torch.nn.Linear)
    assert isinstance(mlp.out, torch.nn.Linear)
    x = torch.randn(2, 3, 24)
    gate, value = F.linear(x, mlp.fc.weight).chunk(2, dim=-1)
    expected = F.linear(gate * torch.sigmoid(gate) * value, mlp.out.weight)
    torch.testing.assert_close(mlp(x), expected)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"kv_heads": 4}, "4 kv_heads do not divide 6 heads; use 3 or 6 kv_heads"),
        ({"kv_heads": 0}, "kv_heads 0 is not positive"),
        ({"kv_heads": 12}, "12 kv_heads do not divide 6 heads"),
        ({"head_dim": 0}, "head_dim 0 is not positive"),
        ({"head_dim": 5}, "a head of 5 is odd; use an even head_dim"),
        ({"norm_eps": 0.0}, "norm_eps 0.0 is outside"),
        ({"rope_theta": 1.0}, "rope_theta 1.0 is outside 1 to 1e"),
        ({"rope_theta": math.inf}, "rope_theta inf is outside"),
        ({"rope_scaling": (0.5, 1.0, 4.0, 16.0)}, "rope_scaling 0.5 1 4 16 is not a factor"),
        ({"rope_scaling": (8.0, 4.0, 4.0, 16.0)}, "Llama 3.1 has 8 1 4 8192"),
        ({"position": "alibi"}, "'alibi' is unknown; choose one of learned, rope"),
        ({"norm": "batch"}, "'batch' is unknown; choose one of layer, rms"),
    ],
)
def test_an_impossible_block_is_refused_with_value_and_fix(
    overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**LLAMA, **overrides})
