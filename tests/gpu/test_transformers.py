"""Our decoders on a GPU against transformers' own in fp32 on the CPU: loss and gradients."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.checkpoint.pretrained.source import TransformersWeights
from launcher.config.families import FAMILIES, family_for
from launcher.model.config import AttentionKind, ModelConfig
from launcher.model.gpt import GPT
from launcher.strategies.parameters import parameter_shapes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
transformers = pytest.importorskip("transformers")

DEVICE = "cuda"
VOCABULARY = 5003  # odd, so that the fused loss pads it
COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "context": 256, "layers": 2, "d_model": 256}
ROPE: dict[str, Any] = {
    **{**COMMON, "d_ff": 640, "heads": 4, "kv_heads": 2, "head_dim": 64},
    **{"position": "rope", "norm": "rms", "activation": "swiglu"},
    **{"bias": "none", "tied": False},
}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {**COMMON, "heads": 4},
    "llama": ROPE,
    "qwen3": {**ROPE, "qk_norm": True},
}
Found = tuple[Tensor, dict[str, Tensor]]


def their_model(family: str) -> Any:
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    document = FAMILIES[family].write(ModelConfig(**SHAPES[family])) | ends
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**document, attn_implementation="eager")
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def tokens() -> Tensor:
    draw = torch.Generator().manual_seed(2)
    return torch.randint(0, VOCABULARY, (4, 201), generator=draw)


def of_transformers(model: Any, device: str, *, autocast: bool) -> Found:
    model, ids = model.to(device), tokens().to(device)
    model.zero_grad()
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach().float().cpu(), gradients_of(model)


def of_ours(folder: Path, attention: AttentionKind, *, autocast: bool) -> Found:
    """By the names of transformers."""
    with TransformersWeights(folder) as source:
        config = replace(source.config, attention=attention, loss_chunk=128)
        model = GPT(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(source.read(name))
    model.to(DEVICE)
    ids = tokens().to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        loss = model(ids[:, :-1], ids[:, 1:].contiguous())
    loss.backward()
    mine, found = gradients_of(model), {}
    for part in family_for(config)[0].parts(config, parameter_shapes(config)):
        rows = mine[part.ours].view(-1)[part.start :][: math.prod(part.shape)].view(part.shape)
        found[part.theirs] = part.turned(rows)
    return loss.detach().float().cpu(), found


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Copies: a module that moves to another device takes its gradients along."""
    return {
        name: parameter.grad.to("cpu", torch.float32, copy=True)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def errors(found: Found, exact: Found) -> tuple[float, float, float]:
    """Relative: of the loss, of all gradients together, and of the worst tensor's."""
    loss = float((found[0] - exact[0]).abs() / exact[0])
    assert found[1].keys() == exact[1].keys()
    off = {name: float((found[1][name] - exact[1][name]).norm()) for name in exact[1]}
    sizes = {name: float(gradient.norm()) for name, gradient in exact[1].items()}
    whole = math.hypot(*off.values()) / math.hypot(*sizes.values())
    return loss, whole, max(off[name] / sizes[name] for name in sizes)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", SHAPES)
def test_fp32_is_transformers(family: str, attention: AttentionKind, tmp_path: Path) -> None:
    theirs = their_model(family)
    theirs.save_pretrained(tmp_path)
    exact = of_transformers(theirs, "cpu", autocast=False)
    loss, _, worst = errors(of_ours(tmp_path, attention, autocast=False), exact)
    assert loss < 1e-5
    assert worst < 1e-3


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", SHAPES)
def test_bf16_is_about_as_exact_as_transformers(
    family: str, attention: AttentionKind, tmp_path: Path
) -> None:
    theirs = their_model(family)
    theirs.save_pretrained(tmp_path)
    exact = of_transformers(theirs, "cpu", autocast=False)
    loss, gradients, _ = errors(of_ours(tmp_path, attention, autocast=True), exact)
    their_loss, their_gradients, _ = errors(of_transformers(theirs, DEVICE, autocast=True), exact)
    # Ours keeps the residual stream in bf16, where theirs has fp32.
    assert loss < 2 * their_loss + 1e-3
    assert gradients < 2 * their_gradients < 0.1
