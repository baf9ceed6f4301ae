"""fp16's loss scale under DeepSpeed and under torch, and from one to the other."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from launcher.run.steps import MOST_IN_A_ROW
from launcher.strategies.engine import LossScale
from launcher.strategies.native import NativeEngine
from launcher.strategies.zero.engine import ZeroEngine, import_deepspeed

WINDOW = 2000


def of_deepspeed() -> ZeroEngine:
    import_deepspeed(torch.device("cpu"))
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(2.0, WINDOW, 1.0, 1, False)
    engine: Any = SimpleNamespace(
        module=nn.Linear(1, 1), optimizer=SimpleNamespace(loss_scaler=scaler)
    )
    inputs: Any = SimpleNamespace(
        resolved=SimpleNamespace(accumulation=1),
        config=SimpleNamespace(sharding=SimpleNamespace(zero=2)),
        model_shards=None,
    )
    return ZeroEngine(engine, inputs)


def of_torch() -> NativeEngine:
    module = nn.Linear(1, 1)
    engine = NativeEngine(
        module,
        torch.optim.SGD(module.parameters(), lr=0.0),
        accumulation=1,
        clip=0.0,
        device=torch.device("cpu"),
        scaled=True,
    )
    engine.set_loss_scale(LossScale(scale=2.0, good_steps=0))
    engine.backward(module(torch.ones(1, 1)).sum())  # the scaler makes its tensors now
    return engine


def take(engine: Any, steps: int) -> None:
    """Go through steps that do not overflow."""
    for _ in range(steps):
        if isinstance(engine, ZeroEngine):
            engine._engine.optimizer.loss_scaler.update_scale(False)
        else:
            engine.backward(engine._module(torch.ones(1, 1)).sum())
            engine.step()


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (0, LossScale(scale=2.0, good_steps=0, overflowed=True)),
        (1, LossScale(scale=2.0, good_steps=0)),
        (2000, LossScale(scale=2.0, good_steps=1999)),
        (2001, LossScale(scale=4.0, good_steps=0)),
        (5000, LossScale(scale=8.0, good_steps=999)),
    ],
)
def test_deepspeed_counts_since_the_scale_last_grew(steps: int, expected: LossScale) -> None:
    zero = of_deepspeed()
    take(zero, steps)
    assert zero.loss_scale() == expected


@pytest.mark.parametrize("steps", [1, 1999, 2000, 5000])
@pytest.mark.parametrize("other", [of_torch, of_deepspeed])
def test_the_scale_grows_as_soon_where_a_run_of_deepspeed_resumes(steps: int, other: Any) -> None:
    zero, resumed = of_deepspeed(), other()
    take(zero, steps)
    saved = zero.loss_scale()
    assert saved is not None
    resumed.set_loss_scale(saved)
    assert resumed.loss_scale() == saved
    left = WINDOW - saved.good_steps
    for more in (left - 1, 1) if left < 5 else (3,):
        take(zero, more)
        take(resumed, more)
        assert resumed.loss_scale() == zero.loss_scale()


def test_a_run_saved_behind_an_overflow_grows_as_late_as_without_a_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    zero, resumed, torchs = of_deepspeed(), of_deepspeed(), of_torch()
    from deepspeed.runtime.fp16 import loss_scaler

    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 0)
    take(zero, 5)
    zero._engine.optimizer.loss_scaler.update_scale(True)
    saved = zero.loss_scale()
    assert saved is not None
    for engine in (resumed, torchs):
        engine.set_loss_scale(saved)
    assert torchs.loss_scale() == LossScale(scale=1.0, good_steps=0)  # torch's own count
    for more in (WINDOW, 1):
        take(zero, more)
        take(resumed, more)
        assert resumed.loss_scale() == zero.loss_scale()
    assert zero.loss_scale() == LossScale(scale=2.0, good_steps=0)


def test_more_good_steps_than_torch_waits_for_let_the_next_one_grow() -> None:
    """As older versions have saved them, and DeepSpeed files with a longer window do."""
    engine = of_torch()
    engine.set_loss_scale(LossScale(scale=2.0, good_steps=5000))
    take(engine, 1)
    assert engine.loss_scale() == LossScale(scale=4.0, good_steps=0)


def test_deepspeed_leaves_the_end_of_a_run_that_overflows_to_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    zero = of_deepspeed()
    from deepspeed.runtime.fp16 import loss_scaler

    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 0)
    for _ in range(MOST_IN_A_ROW):
        zero._engine.optimizer.loss_scaler.update_scale(True)
    assert zero.loss_scale() == LossScale(scale=1.0, good_steps=0, overflowed=True)
