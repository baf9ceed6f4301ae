"""APOLLO against the paper's update in fp64, its projection, and the size of its steps."""

import math

import pytest
import torch
from torch import Tensor, nn

from launcher.optim.apollo import REFRESH_STEPS, Apollo, projection
from launcher.optim.choice import OptimChoice

CPU = torch.device("cpu")
CHOICE = OptimChoice(optimizer="apollo", apollo_rank=3, lr=0.01, betas=(0.8, 0.95))
DECAY = 0.1


def gradient(step: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(shape, generator=generator) * 10.0 ** torch.arange(-shape[0], 0)[:, None]


def textbook(weight: Tensor, steps: int) -> Tensor:
    """Algorithm 1 of the paper with the projection on the right, in fp64."""
    weight, rank = weight.double(), 3
    first = second = torch.zeros(len(weight), rank, dtype=torch.double)
    beta1, beta2 = CHOICE.betas
    for step in range(1, steps + 1):
        full = gradient(step, tuple(weight.shape)).double()
        small = full @ projection(weight.shape[1], rank, (step - 1) // 200, CPU).double()
        first = beta1 * first + (1 - beta1) * small
        second = beta2 * second + (1 - beta2) * small**2
        update = first / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + CHOICE.eps)
        scale = update.norm(dim=1) / small.norm(dim=1) * math.sqrt(weight.shape[1] / rank)
        weight = weight - CHOICE.lr * (DECAY * weight + scale[:, None] * full)
    return weight


@pytest.mark.parametrize("steps", [1, 5, REFRESH_STEPS + 3])
def test_the_update_is_the_papers(steps: int) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(5, 40))
    start = weight.detach().clone()
    optimizer = Apollo([{"params": [weight], "weight_decay": DECAY}], CHOICE)
    for step in range(1, steps + 1):
        weight.grad = gradient(step, (5, 40))
        optimizer.step()
    torch.testing.assert_close(weight.double(), textbook(start, steps), rtol=1e-4, atol=1e-5)


def test_steps_are_as_long_as_adamws() -> None:
    ours, theirs = (nn.Parameter(torch.zeros(64, 256)) for _ in range(2))
    choice = OptimChoice(optimizer="apollo", apollo_rank=32)
    apollo = Apollo([{"params": [ours], "weight_decay": 0.0}], choice)
    adamw = torch.optim.AdamW([theirs], lr=choice.recipe().lr, betas=choice.betas, weight_decay=0.0)
    for step in range(1, 51):
        before = [p.detach().clone() for p in (ours, theirs)]
        for parameter in (ours, theirs):
            parameter.grad = torch.randn(64, 256, generator=torch.Generator().manual_seed(step))
        apollo.step()
        adamw.step()
    lengths = [(p - b).norm() for p, b in zip((ours, theirs), before, strict=True)]
    assert (lengths[0] / lengths[1]).item() == pytest.approx(1.0, rel=0.1)


def test_a_projection_keeps_norms_and_is_another_one_after_its_time() -> None:
    first, second = (projection(1000, 64, seed, CPU) for seed in (0, 1))
    assert torch.equal(first, projection(1000, 64, 0, CPU))
    assert set(first.unique().tolist()) == {-0.125, 0.125}
    # Independent signs: means, and products of columns, of both, and of neighbours, within 5 sigma.
    assert abs(first.sign().mean().item()) < 5 / math.sqrt(64_000)
    for one, other in ((first, second), (first[1:], first[:-1]), (first[:, 1:], first[:, :-1])):
        products = (one.sign() * other.sign()).mean().item()
        assert abs(products) < 5 / math.sqrt(one.numel())
    rows = torch.randn(200, 1000, generator=torch.Generator().manual_seed(0))
    kept = ((rows @ first).norm(dim=1) / rows.norm(dim=1)).square().mean().item()
    assert kept == pytest.approx(1.0, abs=0.03)


def test_no_gradient_moves_nothing() -> None:
    weight = nn.Parameter(torch.ones(4, 8))
    optimizer = Apollo([{"params": [weight], "weight_decay": 0.0}], CHOICE)
    for gradients in (torch.zeros(4, 8), torch.full((4, 8), 1e-30)):
        weight.grad = gradients
        optimizer.step()
        assert torch.isfinite(weight).all()
    assert torch.equal(weight, torch.ones(4, 8))
