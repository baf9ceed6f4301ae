"""Every kind of attention against the textbook form, where its real kernels run: on a GPU."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from launcher.model.attention import KERNELS, AttentionSetting, choose, kernel_for
from launcher.model.config import ActivationCheckpointing, AttentionKind, ModelConfig
from launcher.model.gpt import GPT
from launcher.strategies.compiled import compile_blocks
from launcher.util.errors import UserError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

KINDS: tuple[AttentionKind, ...] = ("sdpa", "flash", "flex")
CONFIG = ModelConfig(vocab_size=64, context=300, layers=2, heads=2, d_model=128)


def _setting(dtype: torch.dtype, window: int | None) -> AttentionSetting:
    return AttentionSetting(
        device_type="cuda",
        dtype=dtype,
        head_size=64,
        window=window,
        dropout=0.0,
        capability=torch.cuda.get_device_capability(),
    )


def _skip_unless_able(kind: AttentionKind, dtype: torch.dtype, window: int | None) -> None:
    try:
        choose(kind, _setting(dtype, window))
    except UserError as error:
        pytest.skip(str(error))


def _with_gradients(
    kind: AttentionKind,
    qkv: list[Tensor],
    direction: Tensor,
    window: int | None,
    starts: Tensor | None = None,
) -> tuple[Tensor, ...]:
    kernel = KERNELS[kind]
    inputs = [part.clone().requires_grad_() for part in qkv]
    mask = kernel.prepare(qkv[0].size(-2), window, qkv[0].device, starts, qkv[0].dtype)
    out = kernel.function(*inputs, mask=mask, window=window, dropout=0.0)
    return (out, *torch.autograd.grad((out * direction).sum(), inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 1, 64])
@pytest.mark.parametrize("seq_len", [1, 37, 128, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_agrees_with_eager_forward_and_backward(
    kind: AttentionKind, seq_len: int, window: int | None, dtype: torch.dtype
) -> None:
    _skip_unless_able(kind, dtype, window)
    torch.manual_seed(0)
    qkv = [torch.randn(2, 3, seq_len, 64, device="cuda", dtype=dtype) for _ in range(3)]
    direction = torch.randn(2, 3, seq_len, 64, device="cuda", dtype=dtype)
    exact = _with_gradients("eager", [part.float() for part in qkv], direction.float(), window)
    got = _with_gradients(kind, qkv, direction, window)
    tolerance = 2e-3 if dtype == torch.float32 else 3e-2  # fp32: flex may use TF32 matmuls
    for ours, theirs in zip(got, exact, strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("seq_len", [1, 37])
def test_cudnn_takes_short_sequences_and_masks(
    seq_len: int, window: int | None, dtype: torch.dtype
) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("cuDNN's fused attention needs compute capability 8.0")
    torch.manual_seed(0)
    qkv = [torch.randn(2, 3, seq_len, 64, device="cuda", dtype=dtype) for _ in range(3)]
    direction = torch.randn(2, 3, seq_len, 64, device="cuda", dtype=dtype)
    exact = _with_gradients("eager", [part.float() for part in qkv], direction.float(), window)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        try:
            got = _with_gradients("sdpa", qkv, direction, window)
        except RuntimeError as error:  # then torch does not choose it by itself either
            pytest.skip(str(error))
    for ours, theirs in zip(got, exact, strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_stays_inside_documents(kind: AttentionKind, window: int | None) -> None:
    _skip_unless_able(kind, torch.bfloat16, window)
    torch.manual_seed(0)
    qkv = [torch.randn(2, 3, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    direction = torch.randn(2, 3, 300, 64, device="cuda", dtype=torch.bfloat16)
    exact_qkv = [part.float() for part in qkv]
    for first in (100, 128, 299):  # one compiled kernel serves them all
        starts = torch.zeros(2, 300, dtype=torch.int64, device="cuda")
        starts[0, first:] = first
        exact = _with_gradients("eager", exact_qkv, direction.float(), window, starts)
        got = _with_gradients(kind, qkv, direction, window, starts)
        for ours, theirs in zip(got, exact, strict=True):
            torch.testing.assert_close(ours.float(), theirs, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("window", [None, 64])
def test_the_backend_that_is_recorded_is_the_one_that_runs(window: int | None) -> None:
    choice = choose("sdpa", _setting(torch.bfloat16, window)).on(torch.device("cuda"), seq_len=300)
    kernel = kernel_for(replace(CONFIG, attention="sdpa", window=window))
    qkv = [
        torch.randn(2, 3, 300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    mask = kernel.prepare(300, window, torch.device("cuda"))
    with torch.profiler.profile() as profile:
        kernel.function(*qkv, mask=mask, window=window, dropout=0.0)
    operators = {event.key for event in profile.key_averages()}
    assert f"aten::_scaled_dot_product_{choice.backend}_attention" in operators or (
        choice.backend == "math" and "aten::_scaled_dot_product_attention_math" in operators
    )


@pytest.mark.parametrize("kind", ["flash", "flex"])
def test_a_window_takes_no_t_by_t_memory(kind: AttentionKind) -> None:
    _skip_unless_able(kind, torch.bfloat16, 64)
    seq_len = 16_384
    qkv = [
        torch.randn(1, 1, seq_len, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    kernel = KERNELS[kind]
    peaks = []
    for _ in range(2):  # the first call compiles
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        mask = kernel.prepare(seq_len, 64, qkv[0].device)
        kernel.function(*qkv, mask=mask, window=64, dropout=0.0).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[-1] < seq_len**2 / 4


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_model_is_the_same_model(
    kind: AttentionKind, window: int | None, checkpointing: ActivationCheckpointing
) -> None:
    _skip_unless_able(kind, torch.bfloat16, window)
    config = replace(CONFIG, window=window, loss_chunk=128)
    tokens = torch.randint(0, config.vocab_size, (2, 300), device="cuda")
    losses, norms = [], []
    runs: tuple[tuple[AttentionKind, ActivationCheckpointing, bool], ...] = (
        ("eager", "none", False),
        (kind, checkpointing, True),
    )
    for attention, mode, compiled in runs:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = GPT(replace(config, attention=attention, activation_checkpointing=mode)).cuda()
        if compiled:
            compile_blocks(model, kept_share=1.0)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        losses.append(float(loss))
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    assert norms[1] == pytest.approx(norms[0], rel=3e-2)
