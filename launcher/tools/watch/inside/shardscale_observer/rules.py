"""Answer a read by the source that reads: the call itself, else its line, else its function."""

from __future__ import annotations

import inspect
import itertools
import linecache
import opcode
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from shardscale_observer.errors import is_ours

_DOES_NOT_HOLD = re.compile(
    r"inf\b|inf_|_inf(?!o|er)|isnan|overflow|invalid|(infi|~[\w. ]*fi|non_?fi|not_?fi)nite"
    r"|stop\b|stop_|_stop|trigger|preempt",
    re.IGNORECASE,
)
_HOLDS = re.compile(
    r"finite|allclose|assert_close|equal|(\b|_)all\(|_all_true\(|\b_check_tensor_all"
    r"|^\s*assert (?!not\b)"  # a program that is to be rehearsed passes its own checks
    r"|0\.0 <= lr"  # an optimizer checks a learning rate on the device
    r"|\bnormal\("  # its C++ asks whether all standard deviations are valid
    r"|loss[\w.()\[\]]*\s*<=?\s*[\w.]*(best|lowest|min)"  # that falls
    r"|(acc|score|f1|auc)[\w.()\[\]]*\s*>=?\s*[\w.]*(best|highest|max)"  # that rises
)
_LOSS = re.compile(
    r"loss(?!\w*(mask|weight|scal|count|tok|num|len))|\bcrit(erion)?\b|\bppl\b|perplexity|\bnll|"
    r"entropy|\br?mse\b",
    re.IGNORECASE,
)
_SCORE = re.compile(
    r"(\b|_)acc(uracy)?(\b|_(?!step|grad))|accuracy|correct(?!ion)|(\b|_)(f1|auc|auroc|m?iou|bleu)\b",
    re.IGNORECASE,
)
_MATCHES = re.compile(r"==|\beq\(|correct", re.IGNORECASE)
"""In a call that counts what is right, not what there is in all."""
_FALLS_TO = 0.99
"""Factor of a loss for each step: a program may end where none falls."""
_READERS_OF_TORCH = ("grad_scaler.py", f"{os.sep}torch{os.sep}distributions{os.sep}")
"""Files of torch's own that say what they read a value for."""
_OPTIMIZERS = f"{os.sep}torch{os.sep}optim{os.sep}"


class Place(NamedTuple):
    """A place where a value is read; `call` is the reading expression, empty if unknown."""

    file: str
    line: int
    function: str
    call: str


def frames() -> Iterator[Any]:
    """Yield the frames of the caller's stack from the reader outwards, without torch's and ours."""
    frame: Any = sys._getframe(1)
    torch = os.path.join(sys.modules["torch"].__path__[0], "")  # torchao is another library
    while frame is not None:
        file = frame.f_code.co_filename
        says_why = any(part in file for part in _READERS_OF_TORCH)
        says_why |= _OPTIMIZERS in file and frame.f_code.co_name == "__init__"
        if not is_ours(file) and (says_why or not file.startswith(torch)):
            yield frame
        frame = frame.f_back


def variables_of(frame: Any) -> dict[str, Any]:
    """Return a frame's variables, and have the frame hold none of them longer than it would.

    Before Python 3.13 a function's frame keeps what was read of it, tensors that its code has
    deleted by then, too.
    """
    kept = frame.f_locals
    found = dict(kept)
    own = frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13)
    # the frame, this function and the call refer to it; one more is the program's `locals()`
    if own and sys.getrefcount(kept) == 3:
        kept.clear()
    return found


def places() -> Iterator[Place]:
    """Yield the places of the frames from the reader outwards."""
    for number, frame in enumerate(frames()):
        code = frame.f_code
        call = _source(code, frame.f_lasti) if number == 0 else ""
        yield Place(code.co_filename, frame.f_lineno, code.co_name, call)


def trend(place: Place, *, of_integer: bool) -> str | None:
    """Return "falling" where a number that is read is a loss, "rising" where it is a score or a
    count of what is right, by the narrowest source that says so."""
    for text in (place.call, linecache.getline(place.file, place.line), place.function):
        if not of_integer and _LOSS.search(text):
            return "falling"
        if _DOES_NOT_HOLD.search(text):
            return None
        if _SCORE.search(text) and (not of_integer or _MATCHES.search(place.call)):
            return "rising"
    return None


def after(trend: str, steps: int, *, of_integer: bool) -> float:
    """Return what such a number is after so many steps, the same on all ranks."""
    if of_integer:
        return 1 + steps
    return _FALLS_TO**steps if trend == "falling" else 1 - _FALLS_TO**steps / 2


def answer(place: Place, *, boolean: bool, mask: bool = False) -> int:
    """Return 0 or 1 by the words of the narrowest source that has any; else 1 for elements of a
    mask, as if it hid nothing."""
    line = linecache.getline(place.file, place.line)
    generation = sys.modules.get("shardscale_rehearsal.generation")
    if generation is not None:
        ends = generation.answer(place.file, place.function, line, boolean=boolean)
        if ends is not None:
            return int(ends)
    for text in (place.call, line, place.function):
        if _DOES_NOT_HOLD.search(text):
            return 0
        if boolean and _HOLDS.search(text):
            return 1
    return 0 if boolean and not mask else 1


def _source(code: Any, last: int) -> str:
    """Return the source of an instruction's expression; empty before Python 3.11 or without it."""
    if last < 0 or not hasattr(code, "co_positions"):
        return ""
    # `co_positions` has one entry per instruction of two bytes
    index = last // 2
    if "JUMP" in opcode.opname[code.co_code[last]]:
        index -= 1  # a jump stands for all of its statement; what it tests was computed before
    begin, end, left, right = next(itertools.islice(code.co_positions(), index, None))
    if None in (begin, end, left, right):
        return ""
    lines = [
        linecache.getline(code.co_filename, number).encode() for number in range(begin, end + 1)
    ]
    lines[-1] = lines[-1][:right]  # first: the same line where there is one
    lines[0] = lines[0][left:]
    return b"".join(lines).decode(errors="replace")
