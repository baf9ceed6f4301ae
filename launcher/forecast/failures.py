"""Choices that the planner could not assess: one row each, and the search goes on."""

import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from launcher.forecast.assess import Assessment
from launcher.forecast.candidates import Choice
from launcher.util.errors import one_line

FAILED: Final = "failed"
_MOST_OF_A_REASON: Final = 120
_PACKAGE: Final = str(Path(__file__).parents[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """A choice that raised an error, through a fault of the planner."""

    choice: Choice
    reason: str
    """The error, and the innermost line of ours that it came through."""

    @classmethod
    def by(cls, error: Exception, choice: Choice) -> "Failed":
        """Keep what a report of the fault needs."""
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename.startswith(_PACKAGE)]
        where = f"{Path(own[-1].filename).name}:{own[-1].lineno}"
        text = f"{type(error).__name__}: {str(error).strip()} ({where})"
        return cls(choice=choice, reason=one_line(text, _MOST_OF_A_REASON))


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Choices with their assessments, and those that failed."""

    assessed: list[Assessment]
    failed: list[Failed]

    @classmethod
    def of_all(cls, outcomes: Iterable["Outcome"]) -> "Outcome":
        """Put several into one."""
        together = cls(assessed=[], failed=[])
        for outcome in outcomes:
            together.assessed.extend(outcome.assessed)
            together.failed.extend(outcome.failed)
        return together


def failed_lines(failed: Sequence[Failed]) -> list[str]:
    """Each reason once, with the first choice that it was raised for."""
    first = {each.reason: each.choice for each in reversed(failed)}
    return [
        f"{FAILED} (a fault of the planner, please report it): {choice.label} in "
        f"{choice.precision} with checkpointing {choice.checkpointing}: {reason}"
        for reason, choice in reversed(first.items())
    ]


def all_failed(failed: Sequence[Failed]) -> str:
    """Say that nothing is left to rank."""
    return (
        f"the planner failed on all {len(failed)} choices, on the first with {failed[0].reason}: "
        "this is a bug, please report it with the command"
    )


def failed_records(failed: Sequence[Failed]) -> list[dict[str, Any]]:
    """Plain records, in the names of those that have a prediction."""
    return [
        {
            "sharding": each.choice.label,
            "precision": each.choice.precision,
            "activation_checkpointing": each.choice.checkpointing,
            "verdict": FAILED,
            "error": each.reason,
        }
        for each in failed
    ]


def first_of_each(failed: Sequence[Failed]) -> list[Failed]:
    """The first failure of each way of sharding."""
    return list({each.choice.label: each for each in reversed(failed)}.values())[::-1]
