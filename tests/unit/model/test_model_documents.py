"""Several documents in a sequence: each must come out as if it stood there alone."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import create_block_mask

from launcher.model.attention import KERNELS, AttentionSetting, choose, flash, flex
from launcher.model.config import ActivationCheckpointing, AttentionKind, ModelConfig
from launcher.model.gpt import GPT, initial_value

GPT2 = ModelConfig(vocab_size=61, context=40, layers=2, heads=2, d_model=16)
LLAMA = replace(GPT2, position="rope", norm="rms", activation="swiglu", kv_heads=1, bias="mlp")
FAMILIES = {"gpt2": GPT2, "llama": LLAMA}
LENGTHS = ([5, 1, 12, 5], [23])  # of the documents of two sequences


def _starts(*rows: list[int]) -> Tensor:
    """[B, T]: for each token where its document begins, of documents of these lengths."""
    starts = [
        [first for n, length in enumerate(row) for first in [sum(row[:n])] * length] for row in rows
    ]
    return torch.tensor(starts)


def _model(config: ModelConfig) -> GPT:
    module = GPT(config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            value = initial_value(name, parameter.shape, config, seed=1, device="cpu")
            parameter.copy_(value * 4)
    return module


def _tokens() -> Tensor:
    return torch.randint(0, 61, (2, 23), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_comes_out_as_if_alone(
    family: str, kind: AttentionKind, window: int | None
) -> None:
    model = _model(replace(FAMILIES[family], attention=kind, window=window)).eval()
    tokens = _tokens()
    with torch.no_grad():
        packed = model(tokens, starts=_starts(*LENGTHS))
        for row, lengths in enumerate(LENGTHS):
            parts = tokens[row].split(lengths)
            alone = torch.cat([model(part[None])[0] for part in parts])
            torch.testing.assert_close(packed[row], alone, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(packed[0], model(tokens)[0], atol=1e-3)


def _loss_and_gradients(config: ModelConfig) -> list[Tensor]:
    model, tokens = _model(config), _tokens()
    loss = model(tokens, tokens.roll(-1, 1), _starts(*LENGTHS))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_recomputed_blocks_stay_inside_documents(
    kind: AttentionKind, mode: ActivationCheckpointing
) -> None:
    plain = _loss_and_gradients(replace(LLAMA, attention="eager"))
    got = _loss_and_gradients(replace(LLAMA, attention=kind, activation_checkpointing=mode))
    # Rounding of fp32: two kernels add up in different orders, in chunks of the loss besides.
    torch.testing.assert_close(got, plain, rtol=1e-5, atol=1e-5)


def test_without_documents_no_kernel_makes_another_mask_than_before() -> None:
    device = torch.device("cpu")
    assert KERNELS["sdpa"].prepare(10, None, device) is None
    assert KERNELS["eager"].prepare(10, None, device).shape == (10, 10)
    assert KERNELS["eager"].prepare(10, 3, device, _starts([4, 6])).shape == (1, 1, 10, 10)


DOCUMENTS = ([300], [128, 172], [1, 126, 2, 171], [64, 65, 64, 107], [100] * 3, [1] * 300)


@pytest.mark.parametrize("window", [None, 1, 100, 128, 200])
@pytest.mark.parametrize("seq_len", [300, 256, 37])
def test_blocks_of_the_flex_mask_are_those_torch_finds_pair_by_pair(
    seq_len: int, window: int | None
) -> None:
    starts = _starts(*DOCUMENTS)[:, :seq_len]

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = query - key <= (seq_len if window is None else window)
        return (query >= key) & near & (starts[batch, query] <= key)

    device = torch.device("cpu")
    ours = flex.block_mask(seq_len, window, device, starts)
    theirs = create_block_mask(visible, len(starts), None, seq_len, seq_len, device="cpu")
    for name in ("kv", "full_kv", "q", "full_q"):
        counts = [getattr(mask, f"{name}_num_blocks") for mask in (ours, theirs)]
        assert torch.equal(*counts)
        lists = [getattr(mask, f"{name}_indices") for mask in (ours, theirs)]
        for sequence, rows in enumerate(counts[0][:, 0].tolist()):
            for row, count in enumerate(rows):
                assert torch.equal(*(found[sequence, 0, row, :count] for found in lists))
    dense = KERNELS["eager"].prepare(seq_len, window, device, starts)
    batch, query, key = torch.meshgrid(
        torch.arange(len(starts)), torch.arange(seq_len), torch.arange(seq_len), indexing="ij"
    )
    assert torch.equal(ours.mask_mod(batch, torch.tensor(0), query, key), dense[:, 0])


def test_flex_agrees_with_eager_in_torchs_reference_implementation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flex, "_compiled", lambda: torch_flex.flex_attention)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda q, k, v: None)
    torch.manual_seed(0)
    starts = _starts(*DOCUMENTS)
    shapes = [(len(starts), heads, 300, 16) for heads in (4, 2, 2)]
    results = []
    for kind in ("eager", "flex"):
        torch.manual_seed(0)
        qkv = [torch.randn(shape, requires_grad=True) for shape in shapes]
        mask = KERNELS[kind].prepare(300, None, torch.device("cpu"), starts)
        out = KERNELS[kind].function(*qkv, mask=mask, window=None, dropout=0.0)
        results.append([out, *torch.autograd.grad(out.square().sum(), qkv)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_flash_passes_documents_as_the_operator_wants_them(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator's arguments, evaluated document by document: its kernels need a GPU."""
    library = torch.library.Library("aten", "IMPL")
    starts = _starts(*LENGTHS)
    torch.manual_seed(0)
    qkv = [torch.randn(2, heads, 23, 16) for heads in (4, 2, 2)]

    def evaluate(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, ...]:
        of_queries, of_keys, *longest, _dropout, causal, _ = rest
        assert torch.equal(of_queries, of_keys)
        assert (of_queries.dtype, longest) == (torch.int32, [23, 23])
        assert causal == (window is None)
        assert options.get("window_size_left") == window
        ends = of_queries.tolist()
        out = torch.cat([_alone(q[a:b], k[a:b], v[a:b]) for a, b in pairwise(ends)])
        return (out, *(torch.empty(0) for _ in range(4)))

    def _alone(*parts: Tensor) -> Tensor:
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        mask = KERNELS["eager"].prepare(q.size(2), window, torch.device("cpu"))
        out = KERNELS["eager"].function(q, k, v, mask=mask, window=window, dropout=0.0)
        return out[0].transpose(0, 1)

    monkeypatch.setattr(flash, "_uses_package", lambda *_: False)
    results = []
    try:
        library.impl("_flash_attention_forward", evaluate, "CPU")
        for kind in ("eager", "flash"):
            kernel = KERNELS[kind]
            mask = kernel.prepare(23, window, torch.device("cpu"), starts)
            with torch.no_grad():
                results.append(kernel.function(*qkv, mask=mask, window=window, dropout=0.0))
    finally:
        library._destroy()
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_which_attention_stays_inside_documents() -> None:
    gpu = AttentionSetting(
        device_type="cuda",
        dtype=torch.bfloat16,
        head_size=64,
        window=None,
        dropout=0.0,
        documents=True,
        capability=(9, 0),
    )
    assert choose("flash", gpu, elsewhere=True).kind == "flash"
    assert choose("auto", gpu).kind in ("flex", "sdpa")  # as triton is installed
    on_cpu = choose("auto", replace(gpu, device_type="cpu", capability=None))
    assert (on_cpu.kind, on_cpu.reason.endswith("with documents as a mask")) == ("sdpa", True)
