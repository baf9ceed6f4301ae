"""Known shapes: each builds, with the parameters that are published, and answers to its names."""

import json

import pytest
import torch

from launcher.config.resolve import resolve
from launcher.config.schema import RunConfig
from launcher.model.config import ModelConfig
from launcher.model.foreign.config import ForeignConfig
from launcher.model.foreign.decoder import new_causal
from launcher.model.foreign.reading import foreign_config
from launcher.model.names import DATA, known_configs, known_names
from launcher.model.sizes import NAMED, known_name
from launcher.util.errors import UserError

UNITS = {"M": 1e6, "B": 1e9}


def test_all_have_the_published_number_of_parameters() -> None:
    differing = []
    for known in known_names().values():
        if known.config is None:
            found = NAMED[known.name].parameter_count
        else:
            with torch.device("meta"):
                causal = new_causal(json.dumps(dict(known.config)), "auto")
            found = sum(p.numel() for p in causal.parameters())
        figure, unit = float(known.parameters[:-1]), UNITS[known.parameters[-1]]
        digits = len(known.parameters[:-1].partition(".")[2])
        if abs(found / unit - figure) > 0.5001 * 10**-digits:
            differing.append((known.name, known.parameters, found))
    assert not differing


@pytest.mark.parametrize(
    ("name", "published"),
    [("mixtral-8x7b", 12.9e9), ("qwen3-30b-a3b", 3.3e9), ("olmoe-1b-7b", 1.3e9)],
)
def test_active_parameters_are_the_published_ones(name: str, published: float) -> None:
    model = foreign_config(known_configs()[name])
    active = model.parameter_count - model.idle_parameters
    assert active == pytest.approx(published, rel=0.02)
    assert f"{active:,} parameters active per token" in model.lines()[0]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("google/gemma-3-4b-pt", "gemma-3-4b"),
        ("microsoft/phi-4", "phi-4"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("allenai/OLMo-2-1124-7B-Instruct", "olmo-2-7b"),
        ("ibm-granite/granite-3.3-8b-instruct", "granite-3.3-8b"),
        ("HuggingFaceTB/SmolLM3-3B", "smollm3-3b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b"),
    ],
)
def test_a_shape_is_known_by_what_people_call_it(text: str, name: str) -> None:
    assert known_name(text) == name


def test_each_name_is_of_one_shape_and_has_a_source() -> None:
    lines = DATA.read_text("utf-8").splitlines()
    assert len(lines) == len(known_names()) >= 130
    for name, known in known_names().items():
        texts = (name.upper(), known.hub or name, *known.also)
        assert {known_name(text) for text in texts} == {name}
        assert known.source
        assert (known.sizes is None) != (known.config is None)


def test_a_shape_is_computed_by_our_own_decoder_where_it_can_be() -> None:
    def resolved(name: str, **changes: str) -> ModelConfig:
        config = RunConfig().replace(model=name, strategy="ddp", **changes)
        return resolve(config, world_size=2, device_type="cpu").model

    assert type(resolved("falcon3-1b")) is ModelConfig
    theirs = resolved("EleutherAI/pythia-70m")
    assert isinstance(theirs, ForeignConfig)
    assert theirs.architecture == "GPTNeoXForCausalLM"
    assert isinstance(resolved("falcon3-1b", decoder="transformers"), ForeignConfig)
    assert RunConfig().replace(model="EleutherAI/pythia-70m").model.label == "pythia-70m"


@pytest.mark.parametrize("name", ["gemma-2-10b", "google/gemma-2-10b"])
def test_an_unknown_name_says_its_nearest_and_how_to_give_a_config(name: str) -> None:
    with pytest.raises(UserError, match="gemma-2-9b") as refused:
        RunConfig().replace(model=name).model.build()
    assert "hf" in str(refused.value)
