"""Every precision learns like fp32, and fp16 survives what overflows."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from harness import write_text
from optimizer_cases import MODEL_FLAGS
from rank_loop import steps

from launcher.parallel.world import World
from launcher.run.prepare import Prepared, prepare
from launcher.strategies.engine import Engine, LossScale
from launcher.strategies.native import NativeEngine
from launcher.train import build_engine

ALONE = World(rank=0, local_rank=0, size=1, local_size=1, device=torch.device("cpu"))
STEPS = 60


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_text(tmp_path_factory.mktemp("precision") / "text.txt"))


def prepared(text: str, precision: str, *more: str) -> Prepared:
    # A CPU is refused fp8, since it can only emulate it; here that is enough.
    asked = "bf16" if precision == "fp8" else precision
    flags = ["--strategy=single", f"--data={text}", f"--steps={STEPS}", "--micro-batch=8"]
    found = prepare(
        [*MODEL_FLAGS, *flags, f"--precision={asked}", *more], world_size=1, ranks_per_node=1
    )
    config = found.resolved.config.replace(precision=precision)
    return replace(found, resolved=replace(found.resolved, config=config))


def built(run: Prepared) -> Engine:
    torch.manual_seed(0)
    engine = build_engine(run.resolved, ALONE)
    engine.set_loss_scale(LossScale(scale=1024.0, good_steps=0))  # 65536 overflows at first
    return engine


@cache
def losses(text: str, precision: str, lr: float, *more: str) -> list[float]:
    run = prepared(text, precision, f"--lr={lr}", "--warmup-steps=0", *more)
    return steps(run.resolved, run.corpus, ALONE, built(run), range(1, STEPS + 1))[0]


# Largest deviation of a step's loss as measured: 3e-4, 1.2e-3, 3e-5, 1.7e-3.
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [("bf16", 2e-3), ("bf16-pure", 5e-3), ("fp16", 5e-4), ("fp8", 8e-3)],
)
def test_learns_like_fp32(precision: str, tolerance: float, text: str) -> None:
    got, expected = losses(text, precision, 1e-3), losses(text, "fp32", 1e-3)
    assert expected[-1] < 0.8 * expected[0]
    assert got == pytest.approx(expected, rel=tolerance)


def test_pure_bf16_without_compensation_learns_less(text: str) -> None:
    """At a small learning rate most updates are below the last bit of the weight."""
    lr = 1e-4
    without = sum(losses(text, "bf16-pure", lr, "--no-compensation")[-10:])
    reference = sum(losses(text, "fp32", lr)[-10:])
    assert sum(losses(text, "bf16-pure", lr)[-10:]) == pytest.approx(reference, rel=2e-3)
    assert without > 1.01 * reference


def test_fp16_skips_what_overflows_and_goes_on_smaller(text: str) -> None:
    run = prepared(text, "fp16")
    engine = built(run)
    assert isinstance(engine, NativeEngine)
    engine.set_loss_scale(LossScale(scale=2.0**24, good_steps=5))
    before = [p.detach().clone() for p in engine._module.parameters()]
    _, norms = steps(run.resolved, run.corpus, ALONE, engine, range(1, 2))
    assert not torch.isfinite(torch.tensor(norms)).any()
    assert all(map(torch.equal, before, engine._module.parameters()))
    assert engine.loss_scale() == LossScale(scale=2.0**23, good_steps=0)
    assert engine.training_state().counters() == {"step": 0}


def test_fp16_grows_again_and_the_scale_can_be_saved(text: str) -> None:
    run = prepared(text, "fp16")
    engine, other = built(run), built(run)
    engine.set_loss_scale(LossScale(scale=512.0, good_steps=1998))
    steps(run.resolved, run.corpus, ALONE, engine, range(1, 2))
    found = engine.loss_scale()
    assert found == LossScale(scale=512.0, good_steps=1999)
    steps(run.resolved, run.corpus, ALONE, engine, range(2, 3))
    assert engine.loss_scale() == LossScale(scale=1024.0, good_steps=0)
    state = json.loads(json.dumps({"scale": found.scale, "good_steps": found.good_steps}))
    other.set_loss_scale(LossScale(**state))
    assert other.loss_scale() == found


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
def test_others_scale_nothing(precision: str, text: str) -> None:
    engine = built(prepared(text, precision))
    assert engine.loss_scale() is None
