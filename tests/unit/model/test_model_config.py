import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT
from launcher.model.products import flops_per_token
from launcher.model.sizes import NAMED, known_name, named

SMALL: dict[str, Any] = {"vocab_size": 97, "context": 16, "layers": 3, "heads": 4, "d_model": 24}


def _count_on_meta(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(config).parameters())


@pytest.mark.parametrize("name", NAMED)
def test_parameter_count_of_a_named_size_is_that_of_the_built_model(name: str) -> None:
    assert _count_on_meta(NAMED[name]) == NAMED[name].parameter_count


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("seed-134m", 134_367_744),
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("tinyllama-1.1b", 1_100_048_384),
        ("smollm2-135m", 134_515_008),
        ("smollm2-360m", 361_821_120),
        ("smollm2-1.7b", 1_711_376_384),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-2-7b", 6_738_415_616),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen2.5-72b", 72_706_203_648),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("mistral-7b", 7_241_732_096),
        ("mistral-7b-v0.3", 7_248_023_552),
    ],
)
def test_parameter_count_is_the_published_one(name: str, parameters: int) -> None:
    assert NAMED[name].parameter_count == parameters


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"tied": False},
        {"bias": "mlp"},
        {"bias": "qkv,proj"},
        {"tied": False, "bias": "none", "d_ff": 31},
        {"activation": "relu", "d_ff": 7},
        {"activation": "swiglu", "d_ff": 7},
        {"activation": "swiglu", "bias": "qkv,proj", "position": "rope", "norm": "rms"},
        {"kv_heads": 2, "head_dim": 10, "qk_norm": True},
        {"kv_heads": 1, "bias": "qkv,mlp"},
        {"bias": "proj,mlp", "head_dim": 5},
    ],
)
def test_parameter_counts_follow_the_switches(switches: dict[str, Any]) -> None:
    config = ModelConfig(**SMALL, **switches)
    with torch.device("meta"):
        model = GPT(config)
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    matmuls = sum(m.weight.numel() for m in linears) + model.head.weight.numel()
    assert _count_on_meta(config) == config.parameter_count
    assert block == config.block_parameter_count
    assert matmuls == config.matmul_parameter_count


def test_flops_per_token_of_the_134m_model() -> None:
    config = NAMED["seed-134m"]
    assert config.matmul_parameter_count == 109_510_656
    assert flops_per_token(config, 256) == 6 * 109_510_656 + 12 * 12 * 768 * 256
    assert 32_000 * flops_per_token(config, 256) == pytest.approx(21.93e12, rel=1e-3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"heads": 5}, "5 heads do not divide d_model 24; use 4 or 6 heads"),
        ({"heads": 100}, "use 24 heads"),
        ({"window": 17}, "window 17 is outside 1 to the context of 16"),
        ({"window": 0}, "window 0"),
        ({"dropout": 1.0}, "dropout 1.0 is outside"),
        ({"dropout": -0.1}, "dropout -0.1 is outside"),
        ({"layers": 0}, "layers 0 is not positive"),
        ({"vocab_size": -1}, "vocab_size -1 is not positive"),
        ({"d_ff": 0}, "d_ff 0 is not positive"),
        ({"loss_chunk": -1}, "loss_chunk -1 is negative"),
        ({"mlp_tile": 0}, "mlp_tile 0 is not positive"),
        ({"activation": "swish"}, "'swish' is unknown; choose one of gelu, relu"),
        ({"attention": "fast"}, "'fast' is unknown; choose one of auto, eager, sdpa"),
        ({"activation_checkpointing": "some"}, "choose one of none, selective, full"),
    ],
)
def test_an_impossible_shape_is_refused_with_value_and_fix(
    overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**SMALL, **overrides})


def test_the_documentation_has_every_named_size() -> None:
    documented = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    for name, model in NAMED.items():
        assert f"| {name} | {model.parameter_count:,} |" in documented


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("unsloth/Meta-Llama-3.1-8B-bnb-4bit", "llama-3.1-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("LLaMA3-8B", "llama-3-8b"),
        ("openai-community/gpt2-xl", "gpt2-xl"),
        ("GPT-2 XL", "gpt2-xl"),
        ("gpt3-175b", "175b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
        ("custom", "custom"),
        ("mistralai/Mistral-7B-Instruct-v0.2", None),  # no window, and another base of frequencies
        ("google/gemma-9-9b", None),
    ],
)
def test_a_model_is_known_by_what_people_call_it(text: str, name: str | None) -> None:
    assert known_name(text) == name


def test_each_named_size_has_its_own_name_however_it_is_written() -> None:
    for name in NAMED:
        assert known_name(name.upper()) == known_name(f"org/{name.replace('-', '_')}") == name


@pytest.mark.parametrize(
    ("text", "nearest"),
    [("qwen3-9b", "qwen3-8b"), ("Llama-3.1-7B", "llama-3.1-8b"), ("gpt2xxl", "gpt2-xl")],
)
def test_an_unknown_name_is_answered_with_the_nearest(text: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' is unknown: the nearest names are .*{nearest}"):
        named(text)


def test_a_custom_model_is_what_is_given_and_nothing_else() -> None:
    assert named("custom", **SMALL, norm="rms") == ModelConfig(**SMALL, norm="rms")
    with pytest.raises(ValueError, match="no sizes of its own; give context, d_model"):
        named("custom", vocab_size=10, layers=1, heads=2)


def test_named_replaces_fields_and_validates_them() -> None:
    assert named("gpt2", dropout=0.1).dropout == 0.1
    with pytest.raises(ValueError, match="heads"):
        named("gpt2", heads=7)


def test_the_config_needs_no_torch() -> None:
    code = "import sys, launcher.model.products; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
