from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import create_block_mask

from launcher.model.attention import KERNELS, AttentionKernel, flash, flex, kernel_for
from launcher.model.config import AttentionKind, ModelConfig, SdpaBackend
from launcher.model.gpt import GPT

CONFIG = ModelConfig(vocab_size=61, context=40, layers=1, heads=2, d_model=16)
TRAINS_ON_CPU = ("eager", "sdpa")
CPU_BACKENDS: tuple[SdpaBackend, ...] = ("flash", "math")


def _attend(kernel: AttentionKernel, qkv: tuple[Tensor, ...], window: int | None) -> Tensor:
    mask = kernel.prepare(qkv[0].size(-2), window, qkv[0].device)
    return kernel.function(*qkv, mask=mask, window=window, dropout=0.0)


def _with_gradients(
    kernel: AttentionKernel, qkv: list[Tensor], direction: Tensor, window: int | None
) -> tuple[Tensor, ...]:
    inputs = tuple(t.clone().requires_grad_() for t in qkv)
    output = _attend(kernel, inputs, window)
    return (output, *torch.autograd.grad((output * direction).sum(), inputs))


def test_every_kind_a_user_can_name_has_a_kernel() -> None:
    assert set(KERNELS) == set(get_args(AttentionKind)) - {"auto"}


@pytest.mark.parametrize("window", [None, 1, 5, 36])
@pytest.mark.parametrize("seq_len", [1, 7, 37])
def test_eager_and_sdpa_agree_forward_and_backward(seq_len: int, window: int | None) -> None:
    torch.manual_seed(0)
    qkv = [torch.randn(2, 3, seq_len, 8) for _ in range(3)]
    direction = torch.randn(2, 3, seq_len, 8)
    expected = _with_gradients(KERNELS["eager"], qkv, direction, window)
    for backend in ("auto", *CPU_BACKENDS):
        kernel = kernel_for(replace(CONFIG, attention="sdpa", sdpa_backend=backend))
        got = _with_gradients(kernel, qkv, direction, window)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 1, 64, 200])
@pytest.mark.parametrize("seq_len", [1, 37, 128, 300])
def test_flex_agrees_with_eager_in_torchs_reference_implementation(
    seq_len: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our block mask in the implementation that needs no compiler; its kernels need a GPU."""
    monkeypatch.setattr(flex, "_compiled", lambda: torch_flex.flex_attention)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda q, k, v: None)
    torch.manual_seed(0)
    qkv = [torch.randn(1, 2, seq_len, 16) for _ in range(3)]
    direction = torch.randn(1, 2, seq_len, 16)
    expected = _with_gradients(KERNELS["eager"], qkv, direction, window)
    got = _with_gradients(KERNELS["flex"], qkv, direction, window)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("window", [None, 1, 63, 64, 127, 128, 129, 255, 256, 400])
@pytest.mark.parametrize("seq_len", [1, 128, 300, 512])
def test_blocks_of_the_flex_mask_are_those_torch_finds_pair_by_pair(
    seq_len: int, window: int | None
) -> None:
    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = query - key <= (seq_len if window is None else window)
        return (query >= key) & near

    ours = flex.block_mask(seq_len, window, torch.device("cpu"))
    theirs = create_block_mask(visible, None, None, seq_len, seq_len, device="cpu")
    assert ours.seq_lengths == theirs.seq_lengths
    for name in ("kv", "full_kv", "q", "full_q"):
        counts = [getattr(mask, f"{name}_num_blocks") for mask in (ours, theirs)]
        assert torch.equal(*counts)
        lists = [getattr(mask, f"{name}_indices") for mask in (ours, theirs)]
        for row, count in enumerate(counts[0][0, 0].tolist()):
            assert torch.equal(*(found[0, 0, row, :count] for found in lists))


def test_no_tensor_of_flash_or_flex_is_t_by_t() -> None:
    seq_len = 4096
    assert KERNELS["flash"].prepare(seq_len, 64, torch.device("cpu")) is None
    mask = flex.block_mask(seq_len, 64, torch.device("cpu"))
    tensors = [value for value in vars(mask).values() if isinstance(value, Tensor)]
    assert tensors
    assert max(tensor.numel() for tensor in tensors) == (seq_len // flex.BLOCK) ** 2


def _seen_by_flash(q: Tensor, left: int | None, right: int | None, causal: bool) -> Tensor:
    """Return the mask that flash-attn's arguments mean by its documentation, bool [T, T]."""
    position = torch.arange(q.size(1))
    ahead = position[None, :] - position[:, None]
    seen = torch.ones_like(ahead, dtype=torch.bool)
    seen &= seen if right is None else ahead <= right
    seen &= seen if left is None else ahead >= -left
    return seen & (ahead <= 0) if causal else seen


@pytest.mark.parametrize("window", [None, 1, 5, 60])
def test_flash_passes_layout_and_window_as_the_operator_wants_them(window: int | None) -> None:
    """The operator's arguments, evaluated in plain arithmetic: its kernels need a GPU."""
    library = torch.library.Library("aten", "IMPL")
    torch.manual_seed(0)
    qkv = tuple(torch.randn(2, 3, 37, 16) for _ in range(3))

    def evaluate(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, ...]:
        _, _, max_q, max_k, dropout, causal, _ = rest
        assert (max_q, max_k, dropout) == (37, 37, 0.0)
        ends = options.get("window_size_left"), options.get("window_size_right")
        seen = _seen_by_flash(q, *ends, causal=causal)
        by_head = (part.transpose(1, 2) for part in (q, k, v))
        out = KERNELS["eager"].function(*by_head, mask=seen, window=None, dropout=0.0)
        return (out.transpose(1, 2), *(torch.empty(0) for _ in range(4)))

    through = partial(flash.through_torch, bounds=None, longest=37, window=window, dropout=0.0)
    try:
        library.impl("_flash_attention_forward", evaluate, "CPU")
        q, k, v = (part.transpose(1, 2) for part in qkv)
        with torch.no_grad():
            got = through(q, k, v).transpose(1, 2)
    finally:
        library._destroy()
    torch.testing.assert_close(got, _attend(KERNELS["eager"], qkv, window), rtol=1e-5, atol=1e-6)


def test_torchs_flash_operator_can_be_differentiated() -> None:
    parts = [
        torch.empty(2, 37, 3, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for _ in range(3)
    ]
    out = flash.through_torch(*parts, bounds=None, longest=37, window=5, dropout=0.0)
    assert out.shape == parts[0].shape
    for part, gradient in zip(parts, torch.autograd.grad(out.sum(), parts), strict=True):
        assert gradient.shape == part.shape


@pytest.mark.parametrize("kind", TRAINS_ON_CPU)
def test_bf16_attention_is_near_fp32(kind: AttentionKind) -> None:
    torch.manual_seed(0)
    qkv = tuple(torch.randn(2, 3, 37, 8) for _ in range(3))
    exact = _attend(KERNELS[kind], qkv, None)
    rounded = _attend(KERNELS[kind], tuple(t.bfloat16() for t in qkv), None)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.03, atol=0.03)


def _influence(config: ModelConfig, position: int, seq_len: int) -> list[bool]:
    """Return for each position whether its logits change when the token at `position` changes."""
    torch.manual_seed(0)
    model = GPT(config).eval()
    tokens = torch.randint(1, config.vocab_size, (1, seq_len))
    changed = tokens.clone()
    changed[0, position] = 0
    with torch.no_grad():
        influenced: list[bool] = (model(tokens) != model(changed)).any(-1)[0].tolist()
    return influenced


@pytest.mark.parametrize("kind", TRAINS_ON_CPU)
@pytest.mark.parametrize("layers", [1, 3])
def test_a_token_influences_itself_and_what_follows_only(kind: AttentionKind, layers: int) -> None:
    influence = _influence(replace(CONFIG, attention=kind, layers=layers), 9, 23)
    assert influence == [position >= 9 for position in range(23)]


@pytest.mark.parametrize("kind", TRAINS_ON_CPU)
@pytest.mark.parametrize(("window", "layers", "reach"), [(1, 1, 1), (6, 1, 6), (6, 2, 12)])
def test_a_window_bounds_influence_to_window_tokens_a_layer(
    kind: AttentionKind, window: int, layers: int, reach: int
) -> None:
    config = replace(CONFIG, attention=kind, window=window, layers=layers)
    influence = _influence(config, 3, 31)
    assert influence == [3 <= position <= 3 + reach for position in range(31)]


def test_sdpa_gets_an_explicit_mask_only_when_the_window_bites() -> None:
    device = torch.device("cpu")
    prepare = KERNELS["sdpa"].prepare
    assert prepare(10, None, device) is None
    assert prepare(10, 9, device) is None
    mask = prepare(10, 8, device, dtype=torch.bfloat16)
    assert mask is not None
    assert mask.dtype is torch.bfloat16
    assert int(mask.isneginf().sum()) == 45 + 1
    assert int((mask == 0).sum()) == 100 - 46


def test_rows_of_an_sdpa_mask_are_aligned_as_gpus_want_them() -> None:
    """Each block of a GPU would copy a mask with other rows, and keep the copy for backward."""
    starts = torch.zeros(2, 511, dtype=torch.int64)
    mask = KERNELS["sdpa"].prepare(511, None, torch.device("cpu"), starts)
    assert mask.shape == (2, 1, 511, 511)
    assert mask.stride() == (511 * 512, 511 * 512, 512, 1)


@pytest.mark.parametrize("kind", TRAINS_ON_CPU)
def test_dropout_acts_in_training_only(kind: AttentionKind) -> None:
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
