"""End transformers' generate() at its length, which the host knows.

Each of its loops asks the device whether every sequence has finished. No kernel finds an end of a
text, so the answer is whether the longest has been reached: in 4.55 and newer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_LOOPS = "/transformers/generation/utils.py"
_reached = False
_length = 0
"""Result of the last call of a criterion of length: whether it is reached, and the length."""


def prepare(module: Any) -> None:
    """Remember what each criterion of length finds."""
    criterion = module.MaxLengthCriteria
    criterion.__call__ = _remembered(criterion.__call__)


def _remembered(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def remember(criterion: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        global _length, _reached
        _length = input_ids.shape[1]
        _reached = _length >= criterion.max_length
        return call(criterion, input_ids, *args, **kwargs)

    return remember


def answer(file: str, function: str, source: str, *, boolean: bool) -> int | None:
    """Answer a loop that asks whether it goes on, or how long the best beam is; None for others."""
    if not file.endswith(_LOOPS):
        return None
    if "sequences[:, :output_length]" in source:
        return _length
    if "beam_search_has_unfinished_sequences" in source:
        return int(not _reached)
    if function == "_has_unfinished_sequences":
        # A sum over ranks counts those that go on; before it each asks whether it has finished.
        return int(_reached if boolean else not _reached)
    return int(_reached) if boolean and "unfinished_sequences.max() == 0" in source else None
