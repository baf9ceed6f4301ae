"""Casts of weights under autocast in one launch: autocast's own bits, in fewer operators."""

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
from dispatched import Operators

from launcher.model import casts, gpt
from launcher.model.gpt import GPT
from launcher.model.sizes import named

LLAMA: dict[str, Any] = {
    **{"position": "rope", "norm": "rms", "activation": "swiglu", "kv_heads": 2, "d_ff": 96},
    **{"qk_norm": True, "bias": "none"},
}
BLOCKS = 2


def model(**changes: Any) -> GPT:
    torch.manual_seed(0)
    sizes = {"layers": BLOCKS, "d_model": 64, "heads": 4, "context": 32, "vocab_size": 128}
    return GPT(named("nano", **sizes, **changes))


def gradients(module: GPT) -> dict[str, torch.Tensor]:
    tokens = torch.randint(128, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = module(tokens, tokens)
    loss.backward()
    found = {"loss": loss.detach()}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad
    return found


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt2", "llama"])
def test_bits_are_autocasts(
    family: dict[str, Any], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = gradients(model(activation_checkpointing=mode, **family))
    monkeypatch.setattr(gpt, "cast_together", lambda *_: contextlib.nullcontext())
    for name, gradient in gradients(model(activation_checkpointing=mode, **family)).items():
        assert torch.equal(ours[name], gradient), name


def test_a_block_casts_once_in_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted() -> Counter[str]:
        operators = Operators()
        with operators:
            gradients(model())
        return operators.counted

    together = counted()
    assert together["aten::_foreach_copy_"] == 2 * BLOCKS
    monkeypatch.setattr(casts, "MOST_ELEMENTS", 64 * 64)
    small = counted()
    assert small["aten::_foreach_copy_"] == 2 * BLOCKS
    larger = 3  # of 3, 4 and 4 times as many elements
    assert small["aten::_to_copy"] - together["aten::_to_copy"] == 2 * BLOCKS * larger
    monkeypatch.setattr(casts, "MOST_ELEMENTS", 0)
    apart = counted()
    assert apart["aten::_foreach_copy_"] == 0
    weights = 8  # of a block: four projections, with a bias each
    assert apart["aten::_to_copy"] - together["aten::_to_copy"] == 2 * BLOCKS * weights


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_gradients_are_added_to_those_there_are_in_one_launch(mode: str) -> None:
    module, apart = model(activation_checkpointing=mode), model(activation_checkpointing=mode)
    gradients(module)
    with Operators() as operators:
        twice = gradients(module)
    assert operators.counted["aten::_foreach_add_"] == BLOCKS
    for parameter in apart.parameters():  # as autograd adds them
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    gradients(apart)
    for name, gradient in gradients(apart).items():
        assert torch.equal(twice[name], gradient), name


def test_weights_are_parameters_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module = model()
    block: Any = module.blocks[0]
    weights = dict(block.named_parameters())

    def fails(x: torch.Tensor) -> torch.Tensor:
        assert block.mlp.fc.weight.dtype is torch.bfloat16
        raise ArithmeticError

    monkeypatch.setattr(block.mlp, "activation", fails)
    with pytest.raises(ArithmeticError):
        gradients(module)
    assert block.mlp.fc.weight is weights["mlp.fc.weight"]
    assert dict(block.named_parameters()) == weights
    monkeypatch.undo()
    gradients(module)
    assert block.mlp.fc.weight is weights["mlp.fc.weight"]


def test_nothing_is_cast_without_autocast_or_gradients() -> None:
    module = model()
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with Operators() as operators:
        module(tokens, tokens).backward()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            module(tokens, tokens)
    assert operators.counted["aten::_foreach_copy_"] == 0
