import subprocess
import sys

import pytest
import torch

from launcher.model.config import NAMED, ModelConfig, named
from launcher.model.cost import flops_per_token
from launcher.model.gpt import GPT

SMALL = {"vocab_size": 97, "context": 16, "layers": 3, "heads": 4, "d_model": 24}


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
    ],
)
def test_parameter_count_is_the_published_one(name: str, parameters: int) -> None:
    assert NAMED[name].parameter_count == parameters


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"tied": False},
        {"attention_bias": False},
        {"mlp_bias": False},
        {"tied": False, "attention_bias": False, "mlp_bias": False, "d_ff": 31},
        {"activation": "relu", "d_ff": 7},
    ],
)
def test_parameter_counts_follow_the_switches(switches: dict[str, object]) -> None:
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
        ({"activation": "swish"}, "'swish' is unknown; choose one of gelu, relu"),
        ({"attention": "fast"}, "'fast' is unknown; choose one of auto, eager, sdpa"),
        ({"activation_checkpointing": "some"}, "choose one of none, selective, full"),
    ],
)
def test_an_impossible_shape_is_refused_with_value_and_fix(
    overrides: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**SMALL, **overrides})


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'gpt5' is unknown.*nano.*gpt2-xl"):
        named("gpt5")


def test_named_replaces_fields_and_validates_them() -> None:
    assert named("gpt2", dropout=0.1).dropout == 0.1
    with pytest.raises(ValueError, match="heads"):
        named("gpt2", heads=7)


def test_the_config_needs_no_torch() -> None:
    code = (
        "import sys, launcher.model.config, launcher.model.cost; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
