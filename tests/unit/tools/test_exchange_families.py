"""Each family of transformers against transformers itself: the same logits, loss and gradients in
both directions, and the same bits there and back."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from launcher.checkpoint import Checkpointer
from launcher.checkpoint.pretrained.source import TransformersWeights
from launcher.config.arguments import parse_run_config
from launcher.config.families import FAMILIES, family_for, read_hf_config, spelled_out
from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT
from launcher.model.sizes import NAMED
from launcher.strategies.native import NativeEngine
from launcher.strategies.parameters import parameter_shapes
from launcher.tools.exchange import export_cli, import_cli

transformers = pytest.importorskip("transformers")

CONTEXT, VOCABULARY = 24, 61
ROPE: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "context": CONTEXT, "layers": 2, "d_model": 20, "d_ff": 28},
    **{"heads": 4, "kv_heads": 2, "position": "rope", "norm": "rms", "activation": "swiglu"},
    **{"bias": "none", "tied": False},
}
# Wavelengths on all three sides of Llama 3's two borders.
LLAMA3 = (4.0, 1.0, 4.0, 16.0)
STARCODER2 = {"norm": "layer", "activation": "gelu", "bias": "all"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"vocab_size": 61, "context": 24, "layers": 2, "heads": 2, "d_model": 12}),
    "llama": ("llama", {**ROPE, "head_dim": 10, "norm_eps": 1e-6}),
    "llama tied, whole heads": ("llama", {**ROPE, "kv_heads": 4, "heads": 4, "d_model": 24}),
    "llama scaled": ("llama", {**ROPE, "head_dim": 6, "rope_scaling": LLAMA3, "tied": True}),
    "llama biases": ("llama", {**ROPE, "head_dim": 6, "bias": "all"}),
    "mistral": ("mistral", {**ROPE, "head_dim": 6, "kv_heads": 1, "window": 5}),
    "qwen2": ("qwen2", {**ROPE, "head_dim": 6, "bias": "qkv", "rope_theta": 1e6}),
    "qwen2 tied, window": ("qwen2", {**ROPE, "d_model": 24, "bias": "qkv", "window": 7}),
    "qwen3": ("qwen3", {**ROPE, "heads": 3, "kv_heads": 1, "head_dim": 10, "qk_norm": True}),
    "qwen3 tied, biases": (
        "qwen3",
        {**ROPE, "head_dim": 6, "qk_norm": True, "tied": True, "bias": "qkv,proj"},
    ),
    "starcoder2": ("starcoder2", {**ROPE, **STARCODER2, "head_dim": 10, "window": 6}),
    "starcoder2 tied, no biases": (
        "starcoder2",
        {**ROPE, "norm": "layer", "activation": "relu", "head_dim": 6, "tied": True},
    ),
}
every_case = pytest.mark.parametrize(("family", "shape"), CASES.values(), ids=CASES)


def randomise(module: nn.Module, seed: int = 1) -> None:
    """Every parameter, norms and biases too, so that one at another's place is seen."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            is_norm = parameter.dim() == 1 and not name.endswith("bias")
            parameter.normal_(mean=1.0 if is_norm else 0.0, std=0.3, generator=draw)


def saved_run(folder: Path, config: ModelConfig) -> GPT:
    """A run folder with a checkpoint of a random model, and the model."""
    module = GPT(config)
    randomise(module)
    optimizer = torch.optim.AdamW(module.parameters())
    engine = NativeEngine(module, optimizer, accumulation=1, clip=0.0, device=torch.device("cpu"))
    extra = {"config": {"tokenizer": "byte"}, "model": config}
    Checkpointer(folder / "checkpoints").save(1, engine, extra)
    return module


def ours_of(source: TransformersWeights) -> GPT:
    """Our model with the parameters of a folder of transformers."""
    module = GPT(source.config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(source.read(name))
    return module


def tokens() -> Tensor:
    draw = torch.Generator().manual_seed(2)
    return torch.randint(0, VOCABULARY, (2, CONTEXT), generator=draw)


def assert_same_model(ours: GPT, theirs: Any) -> None:
    """Logits and loss to 1e-5, each gradient of a tensor to 1e-5 of its largest value."""
    ids = tokens()
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=0, atol=1e-5)
    loss, their_loss = ours(ids[:, :-1], ids[:, 1:].contiguous()), theirs(ids, labels=ids).loss
    torch.testing.assert_close(loss, their_loss, rtol=0, atol=1e-5)
    loss.backward()
    their_loss.backward()
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    their_gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for part in family_for(ours.config)[0].parts(ours.config, parameter_shapes(ours.config)):
        mine, grad = gradients[part.ours], their_gradients.pop(part.theirs)
        assert mine is not None
        rows = mine.view(-1)[part.start :][: math.prod(part.shape)].view(part.shape)
        scale = float(grad.abs().max()) + 1e-3
        torch.testing.assert_close(part.turned(rows) / scale, grad / scale, rtol=0, atol=1e-5)
    assert their_gradients == {}  # each was somebody's


@every_case
def test_exported_it_is_the_same_model_to_transformers(
    family: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    config = ModelConfig(**shape)
    ours = saved_run(tmp_path / "run", config)
    out = tmp_path / "hf"
    assert export_cli.main([str(tmp_path / "run"), "--out", str(out), "--tokenizer=none"]) == 0
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True
    )
    assert not any(report.values())
    assert type(theirs).__name__ == FAMILIES[family].architecture
    assert_same_model(ours, theirs.eval())


@every_case
def test_what_transformers_saves_is_the_same_model_to_us(
    family: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    ends = {"bos_token_id": 0, "eos_token_id": 0}  # a family's own are beyond so few tokens
    their_config = FAMILIES[family].write(ModelConfig(**shape)) | ends
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**their_config)
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    randomise(theirs)
    theirs.save_pretrained(tmp_path / "hf")
    with TransformersWeights(tmp_path / "hf") as source:
        assert spelled_out(source.config) == spelled_out(ModelConfig(**shape))
        ours = ours_of(source)
    assert_same_model(ours, theirs.eval())


@every_case
def test_there_and_back_every_bit_is_the_same(
    family: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    saved_run(tmp_path / "run", ModelConfig(**shape))
    first, second, back = tmp_path / "first", tmp_path / "second", tmp_path / "back"
    assert export_cli.main([str(tmp_path / "run"), "--out", str(first), "--tokenizer=none"]) == 0
    assert import_cli.main([str(first), "--out", str(back)]) == 0
    assert export_cli.main([str(back), "--out", str(second), "--tokenizer=none"]) == 0
    before, after = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    files = ("config.json", "generation_config.json")
    assert all((first / name).read_text() == (second / name).read_text() for name in files)


@every_case
def test_the_settings_of_an_import_are_its_model(
    family: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    """config.yaml, as `--config` reads it, gives the model of the checkpoint beside it."""
    saved_run(tmp_path / "run", ModelConfig(**shape))
    first, back = tmp_path / "first", tmp_path / "back"
    assert export_cli.main([str(tmp_path / "run"), "--out", str(first), "--tokenizer=none"]) == 0
    assert import_cli.main([str(first), "--out", str(back)]) == 0
    choice = parse_run_config(["--config", str(back / "config.yaml")]).model
    assert spelled_out(choice.build()) == spelled_out(read_hf_config(first))


@every_case
def test_any_range_of_a_parameter_is_that_range(
    family: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    ours = saved_run(tmp_path / "run", ModelConfig(**shape))
    out = tmp_path / "hf"
    arguments = [str(tmp_path / "run"), "--out", str(out), "--tokenizer=none", "--dtype=bf16"]
    assert export_cli.main(arguments) == 0
    with TransformersWeights(out) as source:
        for name, parameter in ours.named_parameters():
            whole = parameter.detach().bfloat16()
            assert torch.equal(source.read(name), whole)
            flat, count = whole.float().view(-1), whole.numel()
            for start, stop in ((0, count), (1, count - 1), (count // 3, count // 3 + 7), (5, 5)):
                found = source.read_range(name, start, min(stop, count))
                assert found.dtype == torch.float32
                assert torch.equal(found, flat[start:stop])
            pieces = list(source.parts(name))
            assert torch.equal(torch.cat([piece for _, piece in pieces]), whole.view(-1))


@pytest.mark.parametrize("name", NAMED)
def test_every_named_size_has_a_family(name: str, tmp_path: Path) -> None:
    family, theirs = family_for(NAMED[name])
    (tmp_path / "config.json").write_text(json.dumps(family.write(NAMED[name])))
    config = read_hf_config(tmp_path)
    assert spelled_out(config) == theirs
    biases = {"bias": "all"}  # which GPT-2 always has
    changes = biases if family.model_type == "gpt2" else {}
    assert spelled_out(ModelConfig(**{**as_dict(NAMED[name]), **changes})) == theirs


def as_dict(config: ModelConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ModelConfig.__dataclass_fields__}
