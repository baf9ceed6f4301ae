"""adapter_config.json of PEFT: each field set to wrong types, wrong values and extreme ones."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file

from launcher.checkpoint.pretrained.peft import PeftFolder
from launcher.model.config import ModelConfig
from launcher.util.errors import MOST_CHARACTERS, UserError

RANK = 4
SHAPE: dict[str, Any] = {
    **{"vocab_size": 61, "context": 16, "layers": 2, "heads": 2, "d_model": 16, "d_ff": 24},
    **{"position": "rope", "norm": "rms", "activation": "swiglu", "tied": False},
    **{"bias": "none"},
}
BASE = ModelConfig(**SHAPE)
MODULES = [f"model.layers.{n}.self_attn.{name}_proj" for n in range(2) for name in "qv"]
DOCUMENT: dict[str, Any] = {
    **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 8},
    **{"lora_dropout": 0.0, "use_rslora": False, "target_modules": ["q_proj", "v_proj"]},
    **{"bias": "none", "fan_in_fan_out": False, "rank_pattern": {}, "alpha_pattern": {}},
}
WRONG: tuple[Any, ...] = (
    *(None, True, 0, -4, 5, 2.5, 10**30, 1e300, "", "4", "no", [], [5], ["nowhere"], {}),
    *({"q_proj": "4"}, {"q_proj": -1}, {"q_proj": 8}, {".*": 8}, "(a+)+", "[", "x" * 5000),
)
# What PEFT means by them is what the adapter is, or nothing.
MEANT: dict[str, tuple[Any, ...]] = {
    "bias": (),
    "fan_in_fan_out": (True,),  # PEFT goes by the layer's own type
    "inference_mode": (True,),
    "ensure_weight_tying": (True,),
    "use_rslora": (True,),  # another scale
    "lora_alpha": (5, 2.5),
    "lora_dropout": (0,),
    "exclude_modules": (None, "", "4", "no", [], ["nowhere"]),
    "layers_to_transform": (None, []),
    "layers_pattern": (None, "", [], "4", "no", ["nowhere"], "(a+)+", "[", "x" * 5000),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}, {"q_proj": 8}),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "init_lora_weights": (None, True),
    "use_dora": (None,),
    "lora_bias": (None,),
    "use_qalora": (None,),
}
UNUSED = {"task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"}
UNUSED |= {"megatron_core", "qalora_group_size", "loftq_config", "eva_config", "runtime_config"}
FIELDS = sorted({field.name for field in dataclasses.fields(LoraConfig)})


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapter") / "adapter_model.safetensors"
    torch.manual_seed(0)
    shapes = {"A": (RANK, 16), "B": (16, RANK)}
    names = {f"base_model.model.{m}.lora_{half}.weight": half for m in MODULES for half in "AB"}
    save_file({name: torch.randn(shapes[half]) for name, half in names.items()}, path)
    return path


def read(folder: Path, weights: Path, text: str) -> PeftFolder:
    (folder / "adapter_config.json").write_text(text)
    if not (folder / weights.name).exists():
        (folder / weights.name).symlink_to(weights)
    with PeftFolder(folder, BASE) as adapter:
        return adapter


def test_every_field_of_the_installed_peft_is_covered(weights: Path, tmp_path: Path) -> None:
    saved = LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    saved.save_pretrained(str(tmp_path))
    document = json.loads((tmp_path / "adapter_config.json").read_text())
    assert document.keys() >= {"r", "rank_pattern", "use_dora"}
    lora = read(tmp_path, weights, json.dumps(document)).config.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.targets) == (RANK, 8.0, ("qkv",))


@pytest.mark.parametrize("shape", [(), (RANK,), (RANK, 16, 1)])
def test_a_matrix_without_two_dimensions_is_one_sentence(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    names = [f"base_model.model.{MODULES[0]}.lora_{half}.weight" for half in "AB"]
    path = tmp_path / "adapter_model.safetensors"
    save_file({names[0]: torch.zeros(shape), names[1]: torch.zeros(16, RANK)}, path)
    with pytest.raises(UserError, match=r"A\.weight and B are .* give the base that") as caught:
        read(tmp_path, path, json.dumps(DOCUMENT))
    assert f"are {list(shape)} and [16, {RANK}]" in str(caught.value)


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_is_what_the_tensors_are_or_refused(
    name: str, weights: Path, tmp_path: Path
) -> None:
    meant = MEANT.get(name, () if name in DOCUMENT else (None,))
    for value in WRONG:
        text = json.dumps({**DOCUMENT, name: value})
        if name in UNUSED or any(type(one) is type(value) and one == value for one in meant):
            read(tmp_path, weights, text)
            continue
        with pytest.raises(UserError) as caught:
            read(tmp_path, weights, text)
        said = str(caught.value)
        assert said.startswith(f"{tmp_path / 'adapter_config.json'}: {name}")
        assert repr(value)[:20] in said or isinstance(value, dict)  # one entry of a pattern
        assert len(said) <= MOST_CHARACTERS


def test_what_an_adapter_has_of_its_own_is_read(weights: Path, tmp_path: Path) -> None:
    def lora_of(**changes: Any) -> Any:
        return read(tmp_path, weights, json.dumps({**DOCUMENT, **changes})).config.lora

    assert lora_of(r=8, rank_pattern={"q_proj": 4, "v_proj": 4}).scale == 2.0
    assert lora_of(use_rslora=True).scale == 4.0
    assert lora_of(alpha_pattern={"q_proj": 4, "v_proj": 4}).scale == 1.0
    for targets in (r".*\.[qv]_proj", MODULES, ["self_attn.q_proj", "v_proj", "wte"]):
        assert lora_of(target_modules=targets).targets == ("qkv",)
    everything = {"target_modules": "all-linear", "exclude_modules": ["mlp.up_proj"]}
    with pytest.raises(UserError, match=r"has no adapter on model\.layers\.0\.self_attn\.k_proj"):
        lora_of(**everything)
    others = ["k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert lora_of(**everything | {"exclude_modules": others}).targets == ("qkv",)
    assert lora_of(layers_to_transform=[0, 1], layers_pattern="layers").rank == RANK
    for layers in (0, [1], [0, 10**9]):
        with pytest.raises(UserError, match=r"layers_to_transform is .*, which leaves out"):
            lora_of(layers_to_transform=layers)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"r": 4, "r": 8}', 'the key "r" is given twice'),
        ('{"r": NaN}', "r is nan, which is no JSON number"),
        ('{"r": ' + "9" * 400 + "}", "r is 9999999999..., of 400 digits"),
        ('{"new_field": 1, ' + json.dumps(DOCUMENT)[1:], "new_field is 1, a field that"),
        ("[" * 100_000, "nested too deep"),
    ],
    ids=["twice", "nan", "digits", "unknown", "deep"],
)
def test_a_damaged_file_is_refused(text: str, said: str, weights: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"adapter_config\.json: ") as caught:
        read(tmp_path, weights, text)
    assert said in str(caught.value)
