"""Folders of transformers read as its own decoders: values, tied weights, and what is refused."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_architectures import ARCHITECTURES

from launcher.checkpoint.pretrained.loading import build_any, open_source
from launcher.checkpoint.pretrained.stored import open_stored
from launcher.config.arguments import parse_run_config
from launcher.config.model import ModelChoice
from launcher.config.transformers_config import require_own
from launcher.data.tokenizer import ByteEncoder
from launcher.model.decode import continuation
from launcher.model.foreign.config import ForeignConfig
from launcher.model.foreign.conversion import PREFIX
from launcher.strategies.flat_shards import PARAM, Shard
from launcher.strategies.parameters import parameter_shapes
from launcher.tools.exchange.import_cli import main as import_adapter
from launcher.tools.exchange.layouts import layout_of
from launcher.tools.generate.generate_cli import main as generate
from launcher.tools.prune.prune_cli import main as prune
from launcher.util.errors import UserError

FILE = "model.safetensors"


def saved(folder: Path, name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(4)
    fields = {**copy.deepcopy(dict(ARCHITECTURES[name])), **changes}
    model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name].from_dict(fields))
    model.to(dtype).save_pretrained(folder)
    return model


def test_a_tool_for_our_decoder_alone_says_what_else_can_be_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "gemma", "gemma2")
    ByteEncoder().save(tmp_path / "gemma" / "tokenizer.json")
    assert prune([str(tmp_path / "gemma"), f"--out={tmp_path / 'out'}", "--device=cpu"]) == 2
    said = capsys.readouterr().err
    assert said.endswith("it can be trained, resumed and exported for transformers\n")
    users = ModelChoice(decoder="examples.decoder:build").build()
    with pytest.raises(UserError, match=r"it can be trained and resumed$"):
        require_own(users, "this command")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters_are_those_of_transformers_and_are_exported_as_it_saves_them(
    name: str, tmp_path: Path
) -> None:
    model = saved(tmp_path, name, torch.bfloat16)
    theirs = {f"{PREFIX}{n}": p for n, p in model.named_parameters()}
    with open_stored(tmp_path, "transformers") as stored:
        layout = layout_of(stored)
        files = load_file(tmp_path / FILE)
        assert dict(layout.shapes) == {name: tuple(tensor.shape) for name, tensor in files.items()}
        assert all(torch.equal(layout.read(name), tensor) for name, tensor in files.items())
        assert isinstance(stored.config, ForeignConfig)
        assert parameter_shapes(stored.config).keys() == theirs.keys()
        for own, parameter in theirs.items():
            torch.testing.assert_close(stored.read(own), parameter.detach(), rtol=0, atol=0)
            flat = parameter.detach().float().flatten()
            shard = Shard(name=own, kind=PARAM, start=len(flat) // 3, data=torch.empty(2))
            stored.read_into(shard)
            torch.testing.assert_close(shard.data, flat[shard.start : shard.start + 2])


def changed(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / FILE) | changes
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / FILE)


def test_names_of_older_versions_and_of_a_tied_head_are_known(tmp_path: Path) -> None:
    model = saved(tmp_path, "gemma2")
    tensors = load_file(tmp_path / FILE)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    alone = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(alone, tmp_path / FILE)
    with open_stored(tmp_path) as stored:
        embedding = stored.read(f"{PREFIX}model.embed_tokens.weight")
    assert torch.equal(embedding, model.lm_head.weight)


NORM = "model.norm.weight"
EXPERT = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
DAMAGES: Mapping[str, tuple[str, str, torch.Tensor | None, str]] = {
    "missing": ("gemma2", NORM, None, f"has no tensor {NORM}, which"),
    "unexpected": ("gemma2", "model.extra", torch.ones(1), "model.extra belongs to no Gemma2"),
    "shape": ("gemma2", NORM, torch.ones(3), r"\[3\], but config.json makes"),
    "type": ("gemma2", NORM, torch.ones(32, dtype=torch.int8), "is stored as I8"),
    "tied": ("gemma2", "lm_head.weight", torch.ones(260, 32), "says that they are tied; set"),
    "one expert less": ("mixtral", EXPERT, None, "do not make model.layers.1.mlp.experts"),
    "a narrow expert": ("mixtral", EXPERT, torch.ones(3, 32), "do not make model.layers.1"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_that_do_not_fit_the_config_are_one_sentence(damage: str, tmp_path: Path) -> None:
    name, tensor, value, says = DAMAGES[damage]
    saved(tmp_path, name)
    changed(tmp_path, **{tensor: value})
    with pytest.raises(UserError, match=says) as refused, open_stored(tmp_path):
        pass
    assert str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_else_is_refused_of_a_folder(tmp_path: Path) -> None:
    saved(tmp_path, "gemma2")
    changed(tmp_path, **{"model.norm.weight": torch.full((32,), torch.nan)})
    with open_stored(tmp_path) as stored, pytest.raises(UserError, match="has values that are NaN"):
        stored.read(f"{PREFIX}model.norm.weight")
    document = json.loads((tmp_path / "config.json").read_text())
    for changes, says in (
        ({"quantization_config": {"bits": 4}}, "quantised checkpoint"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "a decoder alone"),
        ({"auto_map": {"AutoModel": "x.Y"}, "model_type": "own"}, "code that comes with the model"),
        ({"num_hidden_layers": 1, "layer_types": None}, "belongs to no Gemma2ForCausalLM"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**document, **changes}))
        with pytest.raises(UserError, match=says), open_stored(tmp_path):
            pass
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"00001-of-00002\.safetensors: there is no such file"):
        open_stored(tmp_path).__enter__()


def test_a_run_adopts_the_config_and_tokenizer_of_the_weights(tmp_path: Path) -> None:
    saved(tmp_path, "gemma2")
    (tmp_path / "tokenizer.json").touch()
    weights = ["--init-from", str(tmp_path)]
    config = parse_run_config(weights)
    assert config.model.build() == parse_run_config(["--model", str(tmp_path)]).model.build()
    assert config.data.tokenizer == str(tmp_path / "tokenizer.json")
    assert config.model.label == tmp_path.name
    shape_alone = ["--model", f"hf:{tmp_path}"]
    assert parse_run_config(shape_alone).data.tokenizer == config.data.tokenizer
    assert parse_run_config([*shape_alone, "--tokenizer", "bpe"]).data.tokenizer == "bpe"
    for flags, says in (
        (["--model", "llama-3-8b"], "leave --model out"),
        (["--layers", "3"], "--layers 3 knows shardscale's own decoder only"),
        (["--decoder", "own"], "only gpt2"),
    ):
        with pytest.raises(UserError, match=says):
            parse_run_config([*weights, *flags]).model.build()
    (tmp_path / "config.yaml").write_text(f"model: hf:{tmp_path}\n")  # of a run that began there
    (tmp_path / "config.json").rename(tmp_path / "kept.json")
    with pytest.raises(UserError, match="there is no file"):
        parse_run_config(weights)


@pytest.mark.parametrize("name", ["gemma3_text", "falcon_h1", "mamba2", "bloom", "mixtral", "opt"])
def test_tokens_are_those_that_transformers_generates(name: str, tmp_path: Path) -> None:
    model = saved(tmp_path, name, initializer_range=0.3).eval()
    prompt = torch.randint(3, 260, (1, 13))
    theirs = model.generate(prompt, do_sample=False, max_new_tokens=20, eos_token_id=None)
    with open_source(tmp_path) as source:
        ours = build_any(source, device=torch.device("cpu"), dtype=torch.float32)
    found = continuation(ours, prompt[0].tolist(), lambda logits: int(logits.argmax()), most=20)
    assert [*found] == theirs[0, 13:].tolist()


def test_generate_reads_the_folder_and_its_chat_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, "mamba2")
    ByteEncoder().save(tmp_path / "tokenizer.json")
    flags = [str(tmp_path), "--prompt", "The cat", "--max-tokens", "5", "--device", "cpu"]
    assert generate(flags) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["prompt"] == "The cat"
    assert 0 < line["tokens"] <= 5
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert generate([*flags, "--chat"]) == 0
    assert len(capsys.readouterr().out) == len(line["text"] + "\n")  # without control characters


def test_an_adapter_of_peft_beside_it_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base, adapter, out = tmp_path / "base", tmp_path / "adapter", tmp_path / "run"
    saved(base, "gemma2")
    model = AutoModelForCausalLM.from_pretrained(base)
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    theirs: Any = get_peft_model(model, settings)
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    theirs.save_pretrained(str(adapter))
    assert import_adapter([str(adapter), "--out", str(out)]) == 0
    flags = capsys.readouterr().out.partition("launcher.train ")[2].split()[:2]
    config = parse_run_config(flags)
    assert config.model.init_from == base
    trained = config.model.build()
    assert trained.lora is not None
    assert trained.lora.targets == ("down_proj", "q_proj")
    with open_stored(out) as stored:
        assert stored.config == trained
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                own, half = name.removeprefix("base_model.model.").split(".lora_")
                ours = stored.read(f"{PREFIX}{own}.lora_{half[0].lower()}")
                assert torch.equal(ours, parameter)
    files = load_file(adapter / "adapter_model.safetensors")
    save_file(files | {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 32)}, adapter / "x")
    (adapter / "x").rename(adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.lora_A\.weight is no adapter"):
        open_stored(adapter).__enter__()
