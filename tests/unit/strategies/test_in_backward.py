"""The optimizer inside the backward: the same numbers, and no gradients left behind."""

from typing import Any

import pytest
import torch

from launcher.config.resolve import resolve
from launcher.config.schema import RunConfig
from launcher.parallel.world import World
from launcher.strategies.engine import Engine, train_step
from launcher.strategies.native import InBackwardEngine
from launcher.train import build_engine

PURE = {"precision": "bf16-pure"}
MODEL = {"vocab_size": 50, "context": 8, "layers": 2, "heads": 2, "d_model": 16}


def new_engine(**changes: Any) -> Engine:
    config = RunConfig().replace(strategy="single", clip=0.0, **MODEL, **changes)
    resolved = resolve(config, world_size=1, device_type="cpu")
    return build_engine(
        resolved,
        World(rank=0, local_rank=0, size=1, local_size=1, device=torch.device("cpu")),
    )


def train(engine: Engine, steps: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step."""
    generator = torch.Generator().manual_seed(1)
    results = []
    for step in range(1, steps + 1):
        tokens = torch.randint(0, 50, (2, 8), generator=generator)
        loss, (norm, _) = train_step(engine, [(tokens, tokens.roll(-1, 1))], 1e-2 / step)
        results.append((loss.item(), float(norm)))
    return results


@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"optimizer": "sgd"}, {"optimizer": "adafactor"}, {"optimizer": "muon"}),
        *({"optimizer": "apollo", "apollo_rank": 4}, PURE),
    ],
    ids=["adamw", "sgd", "adafactor", "muon", "apollo", "bf16-pure"],
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
    held, within = (one.count_states().ledger(tokens.device).device for one in (plain, engine))
    assert held.grads_bytes == held.params_bytes
    assert within.grads_bytes == 0
    assert within.optimizer_bytes > 0


def test_what_is_not_finite_changes_nothing() -> None:
    engine = new_engine(optimizer_in_backward=True)
    assert isinstance(engine, InBackwardEngine)
    before = [p.detach().clone() for p in engine._module.parameters()]
    tokens = torch.arange(16).view(2, 8)
    engine.begin_step(1e-2)
    engine.backward(engine.forward(tokens, tokens, last=True) * float("nan"))
    _, applied = engine.step()
    assert not applied
    assert all(map(torch.equal, before, engine._module.parameters()))


@pytest.mark.parametrize("within", [False, True])
def test_sgd_has_no_momentum_after_a_first_step_that_is_skipped(
    within: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What new memory holds by chance, as on a GPU that has used it for activations.
    monkeypatch.setattr(torch, "empty_like", lambda t, **_: torch.full_like(t, float("nan")))
    engine = new_engine(optimizer="sgd", optimizer_in_backward=within)
    tokens = torch.arange(16).view(2, 8)
    engine.begin_step(1e-2)
    engine.backward(engine.forward(tokens, tokens, last=True) * float("nan"))
    _, applied = engine.step()
    assert not applied
    expected = train(new_engine(optimizer="sgd", optimizer_in_backward=within), 3)
    assert train(engine, 3) == expected
