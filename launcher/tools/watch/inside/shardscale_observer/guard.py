"""Keep failures of the observer inside the observer."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

MOST_FAULTS = 20
"""After as many the observer stops: a hook that fails in every module would cost time."""


FAULTS: list[dict[str, Any]] = []
"""Failures of the observer in this process."""


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function so that it never raises an Exception, and stops after many of them.

    KeyboardInterrupt and SystemExit are the program's and pass.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(FAULTS) >= MOST_FAULTS:
            return None
        try:
            return function(*args, **kwargs)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            line = f"{place.filename.rpartition('/')[2]}:{place.lineno}"
            text = f"{type(error).__name__}: {str(error)[:300]}"
            FAULTS.append({"where": function.__name__, "error": text, "line": line})
            return None

    return call
