"""Tensors that backward recomputes one by one."""

import gc
from collections import Counter

import pytest
import torch
from dispatched import Operators
from torch import Tensor

from launcher.model import casts
from launcher.model.derived import derived, derives, deriving, sparing
from launcher.model.gpt import GPT
from launcher.model.sizes import named

BLOCKS = 2


def step(mode: str) -> tuple[list[Tensor], Counter[str]]:
    """Loss and gradients of one step, and the operators of its backward."""
    torch.manual_seed(0)
    sizes = {"layers": BLOCKS, "d_model": 64, "heads": 4, "context": 32, "vocab_size": 128}
    module = GPT(named("nano", **sizes, activation_checkpointing=mode))
    tokens = torch.randint(128, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = module(tokens, tokens)
    with Operators() as operators:
        loss.backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return [loss.detach(), *gradients], operators.counted


@pytest.mark.parametrize("most_cast_together", [None, 64 * 64])
def test_selective_computes_norms_and_casts_again_to_the_same_bits(
    most_cast_together: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if most_cast_together is not None:  # others one by one, outside of autocast's cache
        monkeypatch.setattr(casts, "MOST_ELEMENTS", most_cast_together)
    none, backward = step("none")
    selective, again = step("selective")
    assert all(torch.equal(*pair) for pair in zip(none, selective, strict=True))
    added = again - backward
    groups = 1 if most_cast_together is None else 4
    kept = "aten::mm", "aten::addmm", "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert added["aten::native_layer_norm"] == 2 * BLOCKS
    # Copies of gradients to the weights' own type are in both.
    assert added["aten::_foreach_copy_"] == BLOCKS * groups + BLOCKS * (groups - 1)
    assert not any(added[name] for name in (*kept, "aten::add", "aten::gelu"))


def test_what_is_noted_is_not_saved_and_comes_back_as_it_was_saved() -> None:
    x = torch.randn(6, 4, requires_grad=True)
    weight = torch.randn(3, 4, requires_grad=True)
    computed = []

    def compute() -> Tensor:
        computed.append(torch.is_grad_enabled())
        return x * 2

    with deriving():
        doubled = compute()
        derived(doubled, compute)
        loss = (doubled @ weight.t()).sum()
    storage = torch.multiprocessing.reductions.StorageWeakRef(doubled.untyped_storage())
    del doubled
    gc.collect()
    assert storage.expired()
    loss.backward()
    assert computed == [True, False]
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, (2 * x.detach()).sum(0).expand(3, 4))


def test_memory_that_is_used_again_is_not_taken_for_what_was_noted() -> None:
    x = torch.randn(1000, requires_grad=True)
    with deriving():
        for _ in range(20):  # each where the one before was
            noted = x.detach() + 1
            derived(noted, lambda: x.detach() + 1)
            del noted
            saved = x * (x.detach() + 3)
    saved.sum().backward()
    torch.testing.assert_close(x.grad, x.detach() + 3)


def test_nothing_is_noted_outside_of_a_block_that_derives() -> None:
    assert not derives()
    with deriving():
        assert derives()
    assert not derives()
    x = torch.randn(4, requires_grad=True)
    y = x.exp()
    derived(y, lambda: pytest.fail("computed again"))
    y.sum().backward()


def test_one_tensor_is_spared() -> None:
    x = torch.randn(6, 4, requires_grad=True)
    weight = torch.randn(4, 3, requires_grad=True)
    active = x.exp()
    with sparing(active, lambda: x.exp()):
        loss = (active @ weight).sum()
    loss.backward()
    torch.testing.assert_close(weight.grad, x.detach().exp().sum(0)[:, None].expand(4, 3))
