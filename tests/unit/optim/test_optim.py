"""The two parameter groups, and the schedule at its edges."""

import math
from typing import Any, get_args

import pytest
import torch
from torch import nn

from launcher.config.resolve import resolve
from launcher.config.schema import OptimChoice, RunConfig
from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT
from launcher.optim.choice import Schedule, learning_rate
from launcher.optim.entry import parameter_groups
from launcher.util.errors import UserError


def test_schedule_at_its_edges() -> None:
    choice = OptimChoice(lr=1.0, min_lr_ratio=0.1, warmup_steps=10)
    rates = [learning_rate(step, choice, 110) for step in range(1, 111)]
    assert rates[0] == pytest.approx(0.1)  # never 0: the first step must count
    assert rates[9] == 1.0
    assert rates[59] == pytest.approx(0.1 + 0.9 * 0.5)  # half-way down the cosine
    assert rates[-1] == pytest.approx(0.1)
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 1), (49, 1), (100, 2), (300, 6)])
def test_warm_up_is_two_percent_unless_given(steps: int, warmup: int) -> None:
    rates = [learning_rate(step, OptimChoice(lr=2.0), steps) for step in range(1, steps + 1)]
    assert rates.index(max(rates)) == warmup - 1
    assert max(rates) == 2.0


def test_no_warm_up() -> None:
    choice = OptimChoice(lr=1.0, warmup_steps=0, min_lr_ratio=0.0)
    assert learning_rate(1, choice, 1) == 0.0
    assert learning_rate(1, choice, 4) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert learning_rate(4, choice, 4) == pytest.approx(0.0)


def test_a_schedule_shorter_than_its_warm_up_and_a_step_beyond_its_end() -> None:
    choice = OptimChoice(lr=1.0, warmup_steps=100)
    assert learning_rate(5, choice, 5) == pytest.approx(0.05)
    assert learning_rate(150, OptimChoice(lr=1.0, warmup_steps=1), 100) == pytest.approx(0.1)


def test_only_matrices_decay() -> None:
    module = GPT(ModelConfig(vocab_size=13, context=8, layers=2, heads=2, d_model=4))
    decayed, rest = parameter_groups(module, 0.25)
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.25, 0.0)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    in_groups = [[names.pop(id(p)) for p in group["params"]] for group in (decayed, rest)]
    assert names == {}, "each parameter is in exactly one group"
    shapes = {name: p.dim() for name, p in module.named_parameters()}
    assert {shapes[name] for name in in_groups[0]} == {2}
    assert {shapes[name] for name in in_groups[1]} == {1}
    assert all("bias" in name or "ln" in name.lower() for name in in_groups[1])


def test_an_empty_group_is_left_out() -> None:
    assert len(parameter_groups(nn.Linear(2, 2, bias=False), 0.1)) == 1


def test_a_sharded_parameter_is_judged_by_its_real_shape() -> None:
    module = nn.Linear(3, 2)
    weight: Any = module.weight
    weight.ds_shape = weight.shape  # as ZeRO-3 leaves it between uses
    weight.data = torch.empty(0)
    decayed, rest = parameter_groups(module, 0.1)
    assert decayed["params"] == [module.weight]
    assert rest["params"] == [module.bias]


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]),
        ("wsd", [0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]),
    ],
)
def test_schedules_as_numbers(schedule: Schedule, rates: list[float]) -> None:
    choice = OptimChoice(
        lr=1.0,
        warmup_steps=2,
        min_lr_ratio=0.2,
        schedule=schedule,
        decay_steps=4 if schedule == "wsd" else None,
    )
    found = [learning_rate(step, choice, 10) for step in range(1, 11)]
    assert found == pytest.approx(rates)
    # Beyond the schedule, where only --stop-after or a shorter --steps leads, nothing goes up.
    assert learning_rate(11, choice, 10) == pytest.approx(rates[-1])


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("warmup", [None, 0, 1, 5, 200])
@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_every_schedule_stays_between_its_ends(
    schedule: Schedule, warmup: int | None, steps: int
) -> None:
    choice = OptimChoice(lr=2.0, schedule=schedule, warmup_steps=warmup, min_lr_ratio=0.25)
    rates = [learning_rate(step, choice, steps) for step in range(1, steps + 1)]
    length = warmup if warmup is not None else max(1, steps // 50)
    after = rates[length:]
    assert all(0.5 <= rate <= 2.0 for rate in after)
    assert after == sorted(after, reverse=True)
    if schedule != "constant" and steps > length:
        assert rates[-1] == pytest.approx(0.5)


def test_a_decay_takes_a_fifth_unless_told_and_at_most_what_warm_up_leaves() -> None:
    choice = OptimChoice(lr=1.0, schedule="wsd", warmup_steps=10, min_lr_ratio=0.0)
    rates = [learning_rate(step, choice, 100) for step in range(1, 101)]
    assert (rates[79], rates[80] < 1, rates[99]) == (1.0, True, 0.0)
    long = OptimChoice(lr=1.0, schedule="wsd", warmup_steps=10, decay_steps=500, min_lr_ratio=0.0)
    assert [learning_rate(s, long, 20) for s in (10, 15, 20)] == pytest.approx([1, 0.5, 0])


def test_decay_steps_belong_to_their_schedule() -> None:
    config = RunConfig().replace(decay_steps=5)
    with pytest.raises(UserError, match="--decay-steps 5 belongs to --schedule wsd, not cosine"):
        resolve(config, world_size=1, device_type="cpu")
    config = config.replace(schedule="wsd")
    resolve(config, world_size=1, device_type="cpu")
    resolve(config.replace(steps=8, warmup_steps=3), world_size=1, device_type="cpu")
    for steps, warmup, most in ((4, 0, 4), (7, 3, 4), (7, 0.4, 5)):
        config = config.replace(steps=steps, warmup_steps=warmup, decay_steps=most + 1)
        with pytest.raises(UserError, match=f"use at most {most}, or more --steps"):
            resolve(config, world_size=1, device_type="cpu")
