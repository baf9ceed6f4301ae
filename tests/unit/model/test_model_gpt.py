import hashlib
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launcher.model.config import Activation, ModelConfig
from launcher.model.gpt import GPT, initial_value

CONFIG = ModelConfig(vocab_size=97, context=24, layers=3, heads=2, d_model=16)
ROOT = Path(__file__).parents[3]


def _build(config: ModelConfig) -> GPT:
    model = GPT(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(name, parameter.shape, config, seed=3, device="cpu"))
    return model


def test_logits_equal_those_of_transformers_gpt2() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=97,
            n_positions=24,
            n_embd=16,
            n_layer=3,
            n_head=2,
            attn_implementation="eager",
        )
    ).eval()
    ours = GPT(CONFIG).eval()
    state = theirs.transformer.state_dict()
    for parameter in state.values():
        parameter.normal_(std=0.3)  # biases and norms too, so that a swapped one shows
    renamed = {"h.": "blocks.", "c_attn": "qkv", "c_fc": "fc", "mlp.c_proj": "mlp.out"}
    renamed["attn.c_proj"] = "attn.proj"
    with torch.no_grad():
        for name, value in state.items():
            transposed = ".c_" in name and name.endswith(".weight")  # theirs is Conv1D, [in, out]
            for old, new in renamed.items():
                name = name.replace(old, new)
            ours.get_parameter(name).copy_(value.T if transposed else value)
        tokens = torch.randint(0, 97, (2, 21))
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_the_loss_is_the_cross_entropy_of_the_logits() -> None:
    model = _build(replace(CONFIG, loss_chunk=7))
    tokens = torch.randint(0, 97, (2, 24))
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100
    expected = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(tokens, targets), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_the_embedding_itself(tied: bool) -> None:
    model = GPT(replace(CONFIG, tied=tied))
    assert (model.head.weight is model.wte.weight) == tied
    assert ("head.weight" in dict(model.named_parameters())) != tied


def test_the_meta_device_allocates_nothing() -> None:
    with torch.device("meta"):
        model = GPT(replace(CONFIG, tied=False))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert list(model.buffers()) == []


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("precision", ["bf16", "autocast"])
def test_low_precision_training_follows_fp32(activation: Activation, precision: str) -> None:
    config = replace(CONFIG, activation=activation, loss_chunk=10)
    tokens = torch.randint(0, 97, (2, 24))
    exact = _build(config)(tokens, tokens)
    model = _build(config)
    if precision == "bf16":
        model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        loss = model(tokens, tokens)
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=5e-3, atol=0.0)
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())


def test_a_sequence_beyond_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="25 tokens exceeds the model's context of 24"):
        GPT(CONFIG)(torch.zeros(1, 25, dtype=torch.int64))


def test_initial_values_have_gpt2_statistics() -> None:
    config = replace(CONFIG, d_model=256, layers=8)
    std = {
        name: float(initial_value(name, (256, 256), config, seed=0, device="cpu").std())
        for name in ("wte.weight", "blocks.0.attn.qkv.weight", "blocks.7.mlp.fc.weight")
    }
    assert list(std.values()) == pytest.approx([0.02] * 3, rel=0.02)
    for name in ("blocks.0.attn.proj.weight", "blocks.7.mlp.out.weight"):
        value = initial_value(name, (256, 256), config, seed=0, device="cpu")
        assert float(value.std()) == pytest.approx(0.02 / math.sqrt(16), rel=0.02)
    for name, parameter in _build(CONFIG).named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif "ln_" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))


def test_initial_values_depend_on_seed_and_name_and_not_on_order() -> None:
    def value(name: str, seed: int) -> torch.Tensor:
        return initial_value(name, (33, 17), CONFIG, seed=seed, device="cpu")

    first = value("blocks.0.attn.qkv.weight", 1)
    torch.manual_seed(99)
    value("wte.weight", 1)
    assert torch.equal(value("blocks.0.attn.qkv.weight", 1), first)
    assert not torch.equal(value("blocks.1.attn.qkv.weight", 1), first)
    assert not torch.equal(value("blocks.0.attn.qkv.weight", 2), first)


def test_initial_values_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    initial_value("wte.weight", (8, 8), CONFIG, seed=0, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_initial_values_are_the_same_in_another_process() -> None:
    code = (
        "import hashlib; from launcher.model.sizes import named;"
        "from launcher.model.gpt import initial_value;"
        "v = initial_value('wte.weight', (64, 48), named('nano'), seed=5, device='cpu');"
        "print(hashlib.sha256(v.numpy().tobytes()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for hash_seed in ("1", "2")
    }
    here = initial_value("wte.weight", (64, 48), CONFIG, seed=5, device="cpu")
    assert digests == {hashlib.sha256(here.numpy().tobytes()).hexdigest()}
