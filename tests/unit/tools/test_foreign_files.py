"""Files of other programs: each field set to wrong types, wrong values and extreme ones, and inputs
that never end."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from launcher.checkpoint.pretrained.loading import _ends_in
from launcher.checkpoint.pretrained.source import TransformersWeights
from launcher.config.families import FAMILIES, read_hf_config
from launcher.data.tokenizer import load_encoder, train_bpe
from launcher.forecast.machine import Machine
from launcher.model.config import ModelConfig
from launcher.strategies.parameters import parameter_shapes
from launcher.util.errors import MOST_CHARACTERS, UserError

SHAPE: dict[str, Any] = {"vocab_size": 61, "context": 24, "layers": 2, "heads": 2, "d_model": 12}
ROPE = {
    **{"position": "rope", "norm": "rms", "activation": "swiglu", "d_ff": 20, "head_dim": 6},
    **{"bias": "none", "tied": False},
}
MODELS = {
    "gpt2": SHAPE,
    "llama": {**SHAPE, **ROPE, "rope_scaling": (4.0, 1.0, 4.0, 16.0)},
    "mistral": {**SHAPE, **ROPE, "window": 5},
    "qwen2": {**SHAPE, **ROPE, "bias": "qkv"},
    "qwen3": {**SHAPE, **ROPE, "qk_norm": True},
    "starcoder2": {
        **{**SHAPE, **ROPE, "norm": "layer", "activation": "gelu"},
        **{"bias": "all"},
    },
}
IDS = {"bos_token_id": 0, "eos_token_id": [0, 60], "pad_token_id": -1}
DOCUMENTS = {
    family: {**FAMILIES[family].write(ModelConfig(**shape)), **IDS}
    for family, shape in MODELS.items()
}
WRONG: tuple[Any, ...] = (
    *(True, -7, 0, 61, 2.5, 10**40, 1e300, -1e300, "", "4", "no", "\u0663", [], [5], ["a"]),
    *({}, {"a": 1}, "x" * 5000, [10**40], {"rope_theta": 7.5}, {"rope_type": "x"}),
)


def kind(value: Any) -> str:
    """JSON's type of a value, with one for all numbers."""
    return "number" if type(value) in (int, float) else type(value).__name__


def config_file(folder: Path, document: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("family", "name"),
    [(family, name) for family, document in DOCUMENTS.items() for name in document],
)
def test_a_field_of_a_config_is_refused_or_changes_nothing_or_is_of_its_type(
    family: str, name: str, tmp_path: Path
) -> None:
    document = DOCUMENTS[family]
    before = read_hf_config(config_file(tmp_path, document))
    refusals = []
    for value in WRONG:
        path = config_file(tmp_path, {**document, name: value})
        try:
            after = read_hf_config(path)
        except UserError as error:
            refusals.append(str(error))
            continue
        assert after == before or kind(value) == kind(document[name])
        assert value not in (10**40, [10**40]) or name == "architectures"
    assert len(refusals) > 10 or name == "architectures"  # what loads the weights is model_type
    assert all("config.json: " in said and len(said) <= MOST_CHARACTERS for said in refusals)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_theta": 5e5}, "rope_theta 500000 and rope_parameters.rope_theta 10000 differ"),
        (
            {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"rope_theta": 2e4}},
            "rope_theta 10000 and rope_scaling.rope_theta 20000 differ",
        ),
        (
            {"rope_parameters": {"rope_type": "default"}},
            "rope_scaling is {'rope_type': 'llama3', 'factor': 4.0",
        ),
        (
            {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "type": "llama3"}},
            "rope_parameters.rope_type is 'default', and rope_parameters.type is 'llama3'",
        ),
        ({"eos_token_id": 61}, "eos_token_id is 61, but must be null or a token id from 0 to 60"),
        ({"eos_token_id": [0, 10**40]}, "eos_token_id is [0, 1000"),
        ({"bos_token_id": True}, "bos_token_id is True"),
        ({"pad_token_id": -2}, "pad_token_id is -2"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, and shardscale's models"),
    ],
)
def test_values_that_contradict_each_other_are_refused(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        read_hf_config(config_file(tmp_path, DOCUMENTS["llama"] | changes))
    assert said in str(caught.value)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a GPT-2, as transformers has one; not to be changed."""
    folder = tmp_path_factory.mktemp("saved")
    config = ModelConfig(**SHAPE)
    parts = FAMILIES["gpt2"].parts(config, parameter_shapes(config))
    save_file({part.theirs: torch.ones(part.their_shape) for part in parts}, folder / WEIGHTS)
    config_file(folder, DOCUMENTS["gpt2"])
    (folder / GENERATION).write_text('{"eos_token_id": [0, 60]}')
    return folder


WEIGHTS, GENERATION = "model.safetensors", "generation_config.json"


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoiled."""
    return Path(shutil.copytree(saved, tmp_path / "gpt2"))


@pytest.mark.parametrize("value", ["61", "-1", "true", '"0"', "1e9", "[[0]]", "{}", "1" + "0" * 40])
def test_ends_of_text_are_tokens_of_the_model(value: str, folder: Path) -> None:
    with TransformersWeights(folder) as source:
        vocab_size = source.config.vocab_size
    assert _ends_in(folder, vocab_size) == {0, 60}
    (folder / GENERATION).write_text(f'{{"eos_token_id": {value}}}')
    for read in (lambda: TransformersWeights(folder), lambda: _ends_in(folder, vocab_size)):
        with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id is ") as caught:
            read()
        assert "from 0 to 60" in str(caught.value)


def spoiled(path: Path, change: Callable[[dict[str, Any]], None]) -> str:
    train_bpe(["some text and some more"] * 9, 280).save(path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    return str(path)


def all_zero(document: dict[str, Any]) -> None:
    document["model"]["vocab"] = dict.fromkeys(document["model"]["vocab"], 0)


def added_elsewhere(document: dict[str, Any]) -> None:
    token = {**document["added_tokens"][0], "id": 999, "content": "<more>"}
    document["added_tokens"].append(token)


def huge_id(document: dict[str, Any]) -> None:
    document["model"]["vocab"]["a"] = 10**40


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (all_zero, "both have id 0"),
        (added_elsewhere, "added token '<more>' has id 999, and would get"),
        (huge_id, "cannot be read as a tokenizer.json"),
    ],
)
def test_a_tokenizer_has_one_token_for_an_id(
    change: Callable[[dict[str, Any]], None], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    load_encoder(spoiled(path, lambda document: None))
    with pytest.raises(UserError) as caught:
        load_encoder(spoiled(path, change))
    assert said in str(caught.value)
    path.write_text(path.read_text().replace('"b":', '"a": 5, "b":', 1))
    with pytest.raises(UserError, match='the key "a" is given twice'):
        load_encoder(str(path))


ENDLESS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "nothing": lambda path: None,
    "deep": lambda path: path.write_text("[" * 100_000),
    "large": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_RDWR), 2**40),
}


@pytest.mark.parametrize("how", ENDLESS)
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", read_hf_config),
        ("machine.json", Machine.load),
        ("tokenizer.json", lambda path: load_encoder(str(path))),
        (GENERATION, lambda path: TransformersWeights(path.parent)),
        (WEIGHTS, lambda path: TransformersWeights(path.parent)),
        (f"{WEIGHTS}.index.json", lambda path: TransformersWeights(path.parent)),
    ],
)
def test_what_never_ends_is_refused_at_once(
    name: str, read: Callable[[Path], object], how: str, folder: Path
) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    ENDLESS[how](path)
    if how == "nothing" and name in (GENERATION, f"{WEIGHTS}.index.json"):
        read(path)  # they may be absent
        return
    with pytest.raises(UserError) as caught:
        read(path)
    assert name in str(caught.value)
    assert len(str(caught.value)) <= MOST_CHARACTERS
