import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from launcher.model.loss import automatic_chunk_rows, linear_cross_entropy, padded, padded_size


def _inputs(rows: int, vocab_size: int, d_model: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, d_model, generator=generator)
    weight = torch.randn(vocab_size, d_model, generator=generator) * 0.1
    targets = torch.randint(0, vocab_size, (rows,), generator=generator)
    targets[::5] = -100
    return hidden, weight, targets


def _loss_and_grads(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_rows: int, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = linear_cross_entropy(hidden, weight, targets, chunk_rows=chunk_rows)
    (loss * scale).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


def _reference(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """torch's own mean cross-entropy in float64."""
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    loss = F.cross_entropy(hidden @ weight.T, targets)
    hidden_grad, weight_grad = torch.autograd.grad(loss, (hidden, weight))
    return loss.detach(), hidden_grad, weight_grad


def _relative_errors(values: tuple[Tensor, ...], reference: tuple[Tensor, ...]) -> list[float]:
    return [
        float((value.double() - exact).norm() / exact.norm())
        for value, exact in zip(values, reference, strict=True)
    ]


@pytest.mark.parametrize("chunk_rows", [1, 7, 16, 53, 200])
def test_chunked_equals_plain_in_fp32(chunk_rows: int) -> None:
    inputs = _inputs(53, 101, 19)
    plain = _loss_and_grads(*inputs, 0)
    chunked = _loss_and_grads(*inputs, chunk_rows)
    for a, b in zip(chunked, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("chunk_rows", [0, 7])
def test_loss_and_gradients_match_a_float64_reference(chunk_rows: int) -> None:
    inputs = _inputs(53, 101, 19)
    results = _loss_and_grads(*inputs, chunk_rows)
    for a, b in zip(results, _reference(*inputs), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-7)


def test_a_scaled_loss_scales_the_gradients() -> None:
    inputs = _inputs(53, 101, 19)
    _, hidden, weight = _loss_and_grads(*inputs, 16)
    _, hidden_third, weight_third = _loss_and_grads(*inputs, 16, scale=1 / 3)
    torch.testing.assert_close(hidden_third * 3, hidden)
    torch.testing.assert_close(weight_third * 3, weight)


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, targets = _inputs(20, 33, 8)
    plain = _loss_and_grads(hidden * 1e3, weight * 1e3, targets, 0)
    chunked = _loss_and_grads(hidden * 1e3, weight * 1e3, targets, 6)
    for a, b in zip(chunked, plain, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_rows", [0, 8])
def test_no_target_at_all_gives_zero_loss_and_gradients(chunk_rows: int) -> None:
    hidden, weight, targets = _inputs(20, 33, 8)
    for value in _loss_and_grads(hidden, weight, torch.full_like(targets, -100), chunk_rows):
        assert torch.equal(value, torch.zeros_like(value))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_near_the_truth_as_plain(dtype: torch.dtype) -> None:
    hidden, weight, targets = _inputs(256, 301, 32)
    inputs = hidden.to(dtype), weight.to(dtype), targets
    reference = _reference(*inputs)
    plain = _loss_and_grads(*inputs, 0)
    chunked = _loss_and_grads(*inputs, 60)
    assert chunked[0].dtype == torch.float32
    assert chunked[1].dtype == chunked[2].dtype == dtype
    loss_error, *grad_errors = _relative_errors(chunked, reference)
    plain_loss_error, *plain_grad_errors = _relative_errors(plain, reference)
    assert loss_error <= plain_loss_error + 1e-6
    for error, plain_error in zip(grad_errors, plain_grad_errors, strict=True):
        # 1/count is applied after the matmul, so a gradient is rounded once more than in plain.
        assert error <= 1.25 * plain_error


def test_an_fp16_loss_scale_rescues_gradients_that_would_underflow() -> None:
    hidden, weight, targets = _inputs(4096, 64, 8)
    weight = weight * 0.01  # gradients of hidden near 1e-7, below what fp16 resolves
    inputs = hidden.half(), weight.half(), targets
    _, grad_hidden, _ = _loss_and_grads(*inputs, 512, scale=2.0**14)
    _, reference, _ = _reference(*inputs)
    error = (grad_hidden.double() / 2**14 - reference).norm() / reference.norm()
    assert error < 5e-3


@pytest.mark.parametrize("chunk_rows", [0, 16])
def test_autocast_multiplies_in_bf16_and_keeps_fp32_gradients(chunk_rows: int) -> None:
    inputs = _inputs(64, 101, 16)
    with torch.autocast("cpu", torch.bfloat16):
        loss, grad_hidden, grad_weight = _loss_and_grads(*inputs, chunk_rows)
    rounded = _loss_and_grads(inputs[0].bfloat16(), inputs[1].bfloat16(), inputs[2], 0)
    assert loss.dtype == grad_hidden.dtype == grad_weight.dtype == torch.float32
    torch.testing.assert_close(loss, rounded[0], rtol=1e-6, atol=0.0)
    torch.testing.assert_close(grad_weight, rounded[2].float(), rtol=0.02, atol=1e-3)


def test_without_gradients_the_loss_is_the_same_and_holds_no_graph() -> None:
    hidden, weight, targets = _inputs(53, 101, 19)
    expected, *_ = _loss_and_grads(hidden, weight, targets, 16)
    with torch.no_grad():
        loss = linear_cross_entropy(
            hidden.requires_grad_(), weight.requires_grad_(), targets, chunk_rows=16
        )
    assert torch.equal(loss, expected)
    assert not loss.requires_grad


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient(frozen: str) -> None:
    hidden, weight, targets = _inputs(53, 101, 19)
    _, *full = _loss_and_grads(hidden, weight, targets, 16)
    hidden.requires_grad_(frozen != "hidden")
    weight.requires_grad_(frozen != "weight")
    linear_cross_entropy(hidden, weight, targets, chunk_rows=16).backward()
    for tensor, expected in zip((hidden, weight), full, strict=True):
        assert tensor.grad is None or torch.equal(tensor.grad, expected)
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")


def test_a_second_backward_is_refused_rather_than_wrong() -> None:
    hidden, weight, targets = _inputs(53, 101, 19)
    loss = linear_cross_entropy(hidden, weight.requires_grad_(), targets, chunk_rows=16)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_the_automatic_chunk_is_on_only_where_it_saves_memory() -> None:
    assert automatic_chunk_rows(192, 4096, 192, fused=False) == 0
    assert automatic_chunk_rows(512, 4096, 192, fused=False) == 512
    assert automatic_chunk_rows(99_999, 4096, 192, fused=False) == 4096
    assert automatic_chunk_rows(99_999, 4096, 192, fused=False, on_host=True) == 256
    assert automatic_chunk_rows(32_000, 32_000, 768, fused=False, on_host=True) == 768
    assert automatic_chunk_rows(32_000, 32_000, 768, fused=False) == 768
    for rows in (1, 100, 768, 769, 1537, 4096, 99_999):
        chunk_rows = automatic_chunk_rows(rows, 50257, 768, fused=False)
        assert chunk_rows == (min(rows, 768) if rows > 768 else 0)


def test_fused_chunks_are_an_eighth_of_the_rows_and_at_most_4096() -> None:
    assert automatic_chunk_rows(512, 4096, 192, fused=True) == 512
    assert automatic_chunk_rows(32_000, 32_000, 768, fused=True) == 4000
    assert automatic_chunk_rows(896_000, 32_000, 768, fused=True) == 4096
    assert automatic_chunk_rows(4096, 32_000, 768, fused=True) == 768


def test_a_fused_products_vocabulary_is_aligned() -> None:
    assert padded_size(50257, torch.float32) == 50257
    assert padded_size(50257, torch.bfloat16) == 50304
    assert padded_size(32_000, torch.float16) == 32_000
    assert padded_size(1000, torch.bfloat16) == 1000
    weight = torch.randn(97, 8)
    larger = padded(weight, torch.bfloat16)
    assert larger.shape == (128, 8)
    assert torch.equal(larger[:97], weight.bfloat16())
    assert not larger[97:].any()
