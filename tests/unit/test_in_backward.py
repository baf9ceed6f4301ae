"""The optimizer inside the backward: the same numbers, and no gradients left behind."""

from typing import Any

import pytest
import torch

from launcher.config.schema import RunConfig
from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT, initial_value
from launcher.optim.registry import build_optimizer
from launcher.parallel.world import World
from launcher.strategies import strategy_of
from launcher.strategies.engine import Engine, Recipe
from launcher.strategies.in_backward import InBackwardEngine

PURE = {"precision": "bf16-pure"}
MODEL = ModelConfig(vocab_size=50, context=8, layers=2, heads=2, d_model=16)


def new_engine(**changes: Any) -> Engine:
    config = RunConfig().replace(strategy="single", clip=0.0, **changes)
    device = torch.device("cpu")
    return strategy_of(config).build(
        Recipe(
            config=config,
            model=MODEL,
            world=World(rank=0, local_rank=0, size=1, local_size=1, device=device),
            accumulation=1,
            new_module=lambda: GPT(MODEL),
            new_optimizer=lambda module: build_optimizer(module, config.optim),
            initial_value=lambda name, shape: initial_value(
                name, shape, MODEL, seed=0, device=device
            ),
        )
    )


def train(engine: Engine, steps: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step."""
    generator = torch.Generator().manual_seed(1)
    results = []
    for step in range(1, steps + 1):
        tokens = torch.randint(0, 50, (2, 8), generator=generator)
        lr = 1e-2 / step
        engine.begin_step(lr)
        loss = engine.forward(tokens, tokens.roll(-1, 1), last=True)
        engine.backward(loss)
        results.append((loss.item(), float(engine.step(lr).grad_norm)))
    return results


@pytest.mark.parametrize(
    "changes",
    [{}, {"optimizer": "sgd"}, {"optimizer": "adafactor"}, {"optimizer": "muon"}, PURE],
    ids=["adamw", "sgd", "adafactor", "muon", "bf16-pure"],
)
def test_the_same_as_after_the_backward(changes: dict[str, Any]) -> None:
    within = train(new_engine(optimizer_in_backward=True, **changes), 5)
    after = train(new_engine(**changes), 5)
    assert [loss for loss, _ in within] == [loss for loss, _ in after]
    # The norm over bf16 gradients after the backward comes in bf16.
    rel = 1e-2 if "precision" in changes else 1e-4
    assert [norm for _, norm in within] == pytest.approx([norm for _, norm in after], rel=rel)


def test_gradients_are_gone_when_the_backward_is_over() -> None:
    plain, engine = new_engine(), new_engine(optimizer_in_backward=True)
    assert isinstance(engine, InBackwardEngine)
    tokens = torch.arange(16).view(2, 8)
    for one in (plain, engine):
        one.begin_step(1e-3)
        one.backward(one.forward(tokens, tokens, last=True))
    assert plain.ledger().device.grads_bytes == plain.ledger().device.params_bytes
    assert engine.ledger().device.grads_bytes == 0
    assert engine.ledger().device.optimizer_bytes > 0


def test_what_is_not_finite_changes_nothing() -> None:
    engine = new_engine(optimizer_in_backward=True)
    assert isinstance(engine, InBackwardEngine)
    before = [p.detach().clone() for p in engine._module.parameters()]
    tokens = torch.arange(16).view(2, 8)
    engine.begin_step(1e-2)
    engine.backward(engine.forward(tokens, tokens, last=True) * float("nan"))
    assert not engine.step(1e-2).applied
    assert all(map(torch.equal, before, engine._module.parameters()))
