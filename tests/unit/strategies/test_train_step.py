"""`train_step`: what a step over an accumulation window comes to, and what it leaves behind."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT
from launcher.model.loss import IGNORE_INDEX
from launcher.strategies.engine import train_step
from launcher.strategies.native import NativeEngine

MODEL = ModelConfig(vocab_size=50, context=8, layers=1, heads=2, d_model=16)
TOKENS = torch.arange(32).view(4, 8)


class Watched(NativeEngine):
    """Keeps weak references to the losses that it has returned."""

    def __init__(self, *, accumulation: int) -> None:
        torch.manual_seed(0)
        module = GPT(MODEL)
        optimizer = torch.optim.SGD(module.parameters())
        device = torch.device("cpu")
        super().__init__(module, optimizer, accumulation=accumulation, clip=0.0, device=device)
        self.losses: list[weakref.ref[Tensor]] = []
        self.closing: list[bool] = []

    def forward(
        self, tokens: Tensor, targets: Tensor, starts: Tensor | None = None, *, last: bool
    ) -> Tensor:
        loss = super().forward(tokens, targets, starts, last=last)
        self.losses.append(weakref.ref(loss))
        self.closing.append(last)
        return loss

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self._module.parameters()])


def test_micro_batches_come_to_the_step_of_the_whole_batch() -> None:
    whole, parts = Watched(accumulation=1), Watched(accumulation=2)
    before = whole.weights()
    loss, (norm, _) = train_step(whole, [(TOKENS, TOKENS)], 0.1)
    pairs = [(part, part) for part in TOKENS.split(2)]
    loss_of_parts, (norm_of_parts, _) = train_step(parts, pairs, 0.1)
    assert parts.closing == [False, True]
    assert float(loss_of_parts) == pytest.approx(float(loss))
    assert float(norm_of_parts) == pytest.approx(float(norm))
    torch.testing.assert_close(parts.weights(), whole.weights())
    assert not torch.equal(parts.weights(), before)


def test_weights_make_the_mean_over_all_targets_of_uneven_micro_batches() -> None:
    targets = TOKENS.clone()
    targets[1:, :] = IGNORE_INDEX
    targets[1, 3] = 5  # 8 targets in the first row, 1 in the second, none in the others
    whole, parts = Watched(accumulation=1), Watched(accumulation=4)
    loss, (norm, _) = train_step(whole, [(TOKENS, targets)], 0.1)
    pairs = list(zip(TOKENS.split(1), targets.split(1), strict=True))
    weights = [count * 4 / 9 for count in (8, 1, 0, 0)]
    loss_of_parts, (norm_of_parts, _) = train_step(parts, pairs, 0.1, weights=weights)
    assert float(loss_of_parts) == pytest.approx(float(loss), rel=1e-6)
    assert float(norm_of_parts) == pytest.approx(float(norm), rel=1e-5)
    torch.testing.assert_close(parts.weights(), whole.weights())


def test_each_verb_runs_in_its_phase_and_a_loss_goes_before_the_next_forward() -> None:
    engine = Watched(accumulation=2)
    phases: list[tuple[str, int]] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        phases.append((name, sum(loss() is not None for loss in engine.losses)))
        yield

    train_step(engine, [(part, part) for part in TOKENS.split(2)], 0.1, phase=phase)
    assert phases == [("forward", 0), ("backward", 1), ("forward", 0), ("backward", 1), ("step", 0)]
