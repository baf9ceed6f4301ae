"""Ranks stop and save at the same step, though they are asked at different times."""

import math
import time

import pytest
import torch

from launcher.config.schema import LoopChoice
from launcher.parallel.world import World
from launcher.run.agreement import Agreement


def rank(number: int, size: int = 2, **options: float) -> Agreement:
    world = World(
        rank=number, local_rank=number, size=size, local_size=size, device=torch.device("cpu")
    )
    return Agreement(world, log_every=10, **options)


class Clock:
    """Stands still until it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)


def settle(ranks: list[Agreement], step: int) -> None:
    requests = [member.requests(step) for member in ranks]
    for member in ranks:
        member.settle(step, [sum(values) for values in zip(*requests, strict=True)])


def test_one_rank_that_is_asked_to_stop_is_enough() -> None:
    ranks = [rank(0), rank(1)]
    settle(ranks, 1)
    assert [member.preempted for member in ranks] == [False, False]
    ranks[1].stop_requested = True
    settle(ranks, 2)
    assert [member.preempted for member in ranks] == [True, True]


def test_only_the_main_rank_watches_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    ranks = [rank(0, max_seconds=60, save_seconds=30), rank(1, max_seconds=1, save_seconds=1)]
    clock.now_s += 20
    settle(ranks, 1)
    assert not any(member.time_is_up or member.save_is_due for member in ranks)
    clock.now_s += 20
    settle(ranks, 2)
    assert all(member.save_is_due and not member.time_is_up for member in ranks)
    for member in ranks:
        member.saved()
    clock.now_s += 25
    settle(ranks, 3)
    assert all(member.time_is_up and not member.save_is_due for member in ranks)


@pytest.mark.parametrize(
    ("choice", "after_s"),
    [
        (LoopChoice(), 600.0),
        (LoopChoice(save_every=0), math.inf),  # which keeps no model
        (LoopChoice(save_minutes=0), math.inf),
        (LoopChoice(save_minutes=0.5, save_every=0), 30.0),
    ],
)
def test_the_clock_saves_unless_it_is_told_not_to(choice: LoopChoice, after_s: float) -> None:
    assert choice.saves_after_s == after_s


@pytest.mark.parametrize(
    ("step_s", "steps"), [(0.01, 10), (0.5, 4), (30.0, 1)], ids=["fast", "medium", "slow"]
)
@pytest.mark.parametrize("reached", [0, 100_000], ids=["fresh", "resumed"])
def test_slow_steps_are_asked_for_more_often(
    step_s: float, steps: int, reached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    alone = rank(0, size=1)
    clock.now_s += step_s
    settle([alone], reached + 1)
    alone.stop_requested = True
    for step in range(reached + 2, reached + 12):
        clock.now_s += step_s
        alone.between_logged_steps(step)
        if alone.preempted:
            break
    assert step == reached + 1 + steps
