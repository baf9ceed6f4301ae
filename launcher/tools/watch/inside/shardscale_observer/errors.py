"""Locate events in the program, and tell errors of memory from others."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from typing import Any

_LIBRARIES = tuple(
    os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")
)
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep


def is_ours(file: str) -> bool:
    """Return True for files of the observer, and of a rehearsal, whose dispatch modes may call what
    the program has called."""
    return file.startswith(_OURS) or "/shardscale_rehearsal/" in file


def is_of_program(file: str) -> bool:
    """Return False for files of libraries, of Python and of the observer."""
    if not file or file.startswith("<") or is_ours(file):
        return False
    if "site-packages" in file or "dist-packages" in file:
        return False
    return not os.path.realpath(file).startswith(_LIBRARIES)


def place_in_program(frame: Any) -> dict[str, Any] | None:
    """Return file, line, function and code of the innermost frame of the program's own files."""
    while frame is not None and not is_of_program(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else _place(frame.f_code, frame.f_lineno)


def is_called_by(function: str) -> bool:
    """Return True if a function of this name is among the callers."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


def place_of_error(error: BaseException) -> dict[str, Any] | None:
    """Return the innermost place of an exception's traceback in the program's own files."""
    found, trace = None, error.__traceback__
    while trace is not None:
        if is_of_program(trace.tb_frame.f_code.co_filename):
            found = _place(trace.tb_frame.f_code, trace.tb_lineno)
        trace = trace.tb_next
    return found


def _place(code: Any, line: int) -> dict[str, Any]:
    file = os.path.abspath(code.co_filename)
    text = linecache.getline(file, line).strip()
    return {"file": file, "line": line, "function": code.co_name, "code": text}


def is_out_of_memory(torch: Any, error: BaseException | None, *, of_host: bool) -> bool:
    """Return whether the device ran out of memory, or the host if that is asked, perhaps as the
    cause of another error, or inside of one of torch.compile's."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        text = str(error) if isinstance(error, RuntimeError) else ""
        if of_host and (
            isinstance(error, MemoryError)
            or "can't allocate memory" in text
            or "not enough memory" in text
        ):
            return True
        error = error.__cause__ or getattr(error, "inner_exception", None)
    return False


def sentence_of_wait(read: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return what to say of a line that reads a value again and again, and its place."""
    file, _, line = read["place"].rpartition(":")
    sentence = (
        f"{read['place']} has read a value {read['times']:,} times in one step, which no "
        f"kernel computes here: set it with --answer {read['place']}=VALUE"
    )
    return sentence, {"file": file, "line": int(line), "code": read["code"]}
