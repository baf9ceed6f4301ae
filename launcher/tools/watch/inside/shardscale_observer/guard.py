"""Keep failures of the observer inside the observer."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

MOST_FAULTS = 20
"""After as many the observer stops: a hook that fails in every module would cost time."""


class Faults:
    """Failures of the observer in this process, until somebody writes them down."""

    def __init__(self) -> None:
        self.count = 0
        self.unwritten: list[dict[str, Any]] = []

    def add(self, where: str, error: BaseException) -> None:
        """Note a failure."""
        self.count += 1
        place = traceback.extract_tb(error.__traceback__)[-1:]
        line = f"{place[0].filename.rpartition('/')[2]}:{place[0].lineno}" if place else None
        if self.count <= MOST_FAULTS:
            text = f"{type(error).__name__}: {str(error)[:300]}"
            self.unwritten.append({"where": where, "error": text, "line": line})


FAULTS = Faults()


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function so that it never raises an Exception, and stops after many of them.

    KeyboardInterrupt and SystemExit are the program's and pass.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if FAULTS.count >= MOST_FAULTS:
            return None
        try:
            return function(*args, **kwargs)
        except Exception as error:
            FAULTS.add(function.__name__, error)
            return None

    return call
