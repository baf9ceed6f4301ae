"""Published runs that differ in one choice only: is the better one predicted to be the better?"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from published_plan import Planned
from published_rows import Row

# Flags that are one choice; the global batch follows from the micro-batch.
CHOICES: Final = {
    "sharding": ("--strategy", "--zero", "--no-reshard-after-forward"),
    "checkpointing": ("--activation-checkpointing",),
    "precision": ("--precision",),
    "compile": ("--compile",),
    "micro-batch": ("--micro-batch", "--global-batch"),
    "loss": ("--loss-chunk",),
    "optimizer": ("--optimizer", "--optimizer-in-backward"),
}
LEAST_DIFFERENCE: Final = 0.03
"""Of the published figures; less is within what repeating a run changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two runs: names of both and the published and predicted figure of each."""

    choice: str
    keys: tuple[str, str]
    published: tuple[float, float]
    planned: tuple[float, float]


def ordered(pair: Pair) -> bool:
    """Return whether the published order is the predicted one."""
    (a, b), (c, d) = pair.published, pair.planned
    return (a < b) == (c < d)


def pairs_of(results: Sequence[tuple[Row, Planned]], kind: str) -> list[Pair]:
    """All pairs by `bytes`, or by `seconds` for a token of each GPU."""
    found = []
    for (row, plan), (other, its_plan) in combinations(results, 2):
        same = _setting(row) == _setting(other)
        choice = one_choice(row, other) if same else None
        if choice is None:
            continue
        for one, two in zip(
            _figures(row, plan, kind), _figures(other, its_plan, kind), strict=True
        ):
            if one is None or two is None or abs(one[0] / two[0] - 1) < LEAST_DIFFERENCE:
                continue
            found.append(
                Pair(
                    choice=choice,
                    keys=(row.key, other.key),
                    published=(one[0], two[0]),
                    planned=(one[1], two[1]),
                )
            )
    return found


def _setting(row: Row) -> tuple[object, ...]:
    """Return what both of a pair have in common, also in how they were measured."""
    return row.source, row.gpu, row.gpus, row.unlike_seconds != ""


def one_choice(row: Row, other: Row) -> str | None:
    """Return the choice that differs between two runs, where it is one only; else None."""
    flags, others = _flags(row), _flags(other)
    differ = {name for name in {*flags, *others} if flags.get(name) != others.get(name)}
    for choice, names in CHOICES.items():
        if differ and differ <= set(names):
            return choice
    return None


def _flags(row: Row) -> dict[str, str]:
    """Flag -> value; empty for a switch."""
    words = shlex.split(row.flags)
    found, name = {}, ""
    for word in words:
        if word.startswith("--"):
            name = word
            found[name] = ""
        else:
            found[name] = word
    return found


def _figures(row: Row, plan: Planned, kind: str) -> list[tuple[float, float] | None]:
    """(published, planned); None where one is not known or another program's."""
    if kind == "seconds":
        if row.step_s is None or plan.planned_step_s is None:
            return [None]
        tokens = int(_flags(row)["--global-batch"])
        return [(row.step_s / tokens, plan.planned_step_s / tokens)]
    figures = (
        (row.allocated_bytes, plan.planned_allocated_bytes),
        (row.reserved_bytes, plan.planned_reserved_bytes),
    )
    return [None if a is None or b is None else (a, b) for a, b in figures]
