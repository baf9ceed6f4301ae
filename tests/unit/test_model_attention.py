from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from model.attention import KERNELS, build_mask, resolve_attention
from model.config import AttentionKind, ModelConfig
from model.gpt import GPT

CONFIG = ModelConfig(vocab_size=61, context=40, layers=1, heads=2, d_model=16)
KINDS = tuple(KERNELS)


def _attend(kind: str, qkv: tuple[Tensor, ...], window: int | None) -> Tensor:
    mask = build_mask(KERNELS[kind], qkv[0].size(-2), window, qkv[0].device)
    return KERNELS[kind].function(*qkv, mask=mask, window=window, dropout=0.0)


def test_every_kind_a_user_can_name_has_a_kernel() -> None:
    assert set(KERNELS) == set(get_args(AttentionKind)) - {"auto"}


@pytest.mark.parametrize("window", [None, 1, 5, 36])
@pytest.mark.parametrize("seq_len", [1, 7, 37])
def test_eager_and_sdpa_agree_forward_and_backward(seq_len: int, window: int | None) -> None:
    torch.manual_seed(0)
    qkv = [torch.randn(2, 3, seq_len, 8) for _ in range(3)]
    direction = torch.randn(2, 3, seq_len, 8)
    results = []
    for kind in ("eager", "sdpa"):
        inputs = tuple(t.clone().requires_grad_() for t in qkv)
        output = _attend(kind, inputs, window)
        results.append((output, *torch.autograd.grad((output * direction).sum(), inputs)))
    for eager, sdpa in zip(*results, strict=True):
        torch.testing.assert_close(eager, sdpa, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_attention_is_near_fp32(kind: str) -> None:
    torch.manual_seed(0)
    qkv = tuple(torch.randn(2, 3, 37, 8) for _ in range(3))
    exact = _attend(kind, qkv, None)
    rounded = _attend(kind, tuple(t.bfloat16() for t in qkv), None)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.03, atol=0.03)


def _influence(config: ModelConfig, position: int, seq_len: int) -> list[bool]:
    """Which positions' logits change when the token at `position` changes."""
    torch.manual_seed(0)
    model = GPT(config).eval()
    tokens = torch.randint(1, config.vocab_size, (1, seq_len))
    changed = tokens.clone()
    changed[0, position] = 0
    with torch.no_grad():
        return (model(tokens) != model(changed)).any(-1)[0].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [1, 3])
def test_a_token_influences_itself_and_what_follows_only(kind: str, layers: int) -> None:
    influence = _influence(replace(CONFIG, attention=kind, layers=layers), 9, 23)
    assert influence == [position >= 9 for position in range(23)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("window", "layers", "reach"), [(1, 1, 1), (6, 1, 6), (6, 2, 12)])
def test_a_window_bounds_influence_to_window_tokens_a_layer(
    kind: str, window: int, layers: int, reach: int
) -> None:
    config = replace(CONFIG, attention=kind, window=window, layers=layers)
    influence = _influence(config, 3, 31)
    assert influence == [3 <= position <= 3 + reach for position in range(31)]


def test_sdpa_gets_an_explicit_mask_only_when_the_window_bites() -> None:
    device = torch.device("cpu")
    assert build_mask(KERNELS["sdpa"], 10, None, device) is None
    assert build_mask(KERNELS["sdpa"], 10, 9, device) is None
    mask = build_mask(KERNELS["sdpa"], 10, 8, device)
    assert mask is not None
    assert int((~mask.tril()).sum()) == 45 + 1


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_acts_in_training_only(kind: str) -> None:
    torch.manual_seed(0)
    model = GPT(replace(CONFIG, attention=kind, dropout=0.5))
    model.drop.p = 0.0
    for module in model.blocks[0].modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # what is left is the dropout on attention weights
    tokens = torch.randint(0, CONFIG.vocab_size, (2, 20))
    with torch.no_grad():
        assert not torch.equal(model(tokens), model(tokens))
        model.eval()
        assert torch.equal(model(tokens), model(tokens))


def test_resolution_says_what_runs_and_why() -> None:
    assert resolve_attention("eager", window=None) == ("eager", "requested")
    kind, reason = resolve_attention("auto", window=None)
    assert kind == "sdpa"
    assert "T x T" in reason
    kind, reason = resolve_attention("auto", window=8)
    assert kind == "sdpa"
    assert "window" in reason
