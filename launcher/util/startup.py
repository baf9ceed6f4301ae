"""Start and end of a process: no garbage collection during imports, the log level of libraries,
what the user has told torch's allocator, and output whose reader may leave early.

Imports leave some 300,000 objects behind, which stay. Python's collector would look through them
again and again as they come in, and now and then while training, on one rank with the others
waiting (bench/startup.py).
"""

import contextlib
import gc
import importlib.machinery
import io
import logging
import os
import re
import select
import sys
from collections.abc import Iterator
from typing import Any

import launcher
from launcher.util.errors import UserError

_PATIENCE_S = 5.0
# In torch's order; the first that is set counts, an empty one too.
_ALLOCATOR_VARIABLES = tuple(f"PYTORCH_{name}ALLOC_CONF" for name in ("CUDA_", "HIP_", ""))


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Hold the collector back; from then on it passes over all that there is by now."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collecting:
            gc.enable()


def libraries_say(level: str) -> None:
    """What torch, DeepSpeed and the Hugging Face libraries log: all at `debug`, else warnings, or
    errors."""
    theirs = "warning" if level == "info" else level
    logging.basicConfig(format="%(name)s: %(levelname)s: %(message)s")
    logging.getLogger().setLevel(theirs.upper())
    for variable in ("TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(variable, theirs)
    if level in ("warning", "error"):
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def allocator_variable() -> tuple[str, str] | None:
    """(name, value) of what the user has set for torch's CUDA allocator."""
    return next(
        ((name, os.environ[name]) for name in _ALLOCATOR_VARIABLES if name in os.environ), None
    )


def expands_segments(asked: bool) -> bool:
    """Whether torch's CUDA allocator has expandable segments in a run that asks for them, or not:
    where the user has set its variable, that decides."""
    variable = allocator_variable()
    if variable is None:
        return asked
    _, value = variable
    found = re.findall(r"expandable_segments:(\w+)", re.sub(r"\s", "", value))
    return found[-1:] == ["True"]


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """End the process well if nobody reads on: `shardscale plan ... | head` has what it wanted."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as end:
        # rich makes exit code 1 of it.
        if isinstance(end, SystemExit) and not isinstance(end.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


class _Outlet(io.FileIO):
    """Standard output or error of a process that goes on, whoever reads it.

    What a reader that has gone (`| head`), a full disk (`> log`) or a closed terminal does not take
    is dropped; so is what a reader that is there, but reads no more, has not taken for a while.
    """

    _patience_s = _PATIENCE_S

    def write(self, data: Any) -> int:
        """Write some of it, or drop it."""
        piece = memoryview(data).cast("B")[: select.PIPE_BUF]  # fits wherever there is any room
        with contextlib.suppress(OSError):
            if select.select([], [self], [], self._patience_s)[1]:
                self._patience_s = _PATIENCE_S
                super().write(piece)
            else:
                self._patience_s = 0.0  # until it reads on
        return len(piece)


def outlive_readers() -> None:
    """From now on this process does not depend on who reads what it prints."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        try:
            os.fstat(number)
        except OSError:  # closed; the next file to be opened would get its number, and its text
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        before = getattr(sys, name)
        if before is getattr(sys, f"__{name}__"):  # nobody captures it
            outlet = io.BufferedWriter(_Outlet(number, "w", closefd=False))
            encoding = getattr(before, "encoding", "utf-8")
            text = io.TextIOWrapper(outlet, encoding, "backslashreplace", line_buffering=True)
            setattr(sys, name, text)


def require_own_package() -> None:
    """Refuse where `python -m launcher...`, which starts ranks, would find another `launcher`.

    Raises:
        UserError: in the working folder, or on PYTHONPATH.
    """
    here = [] if os.environ.get("PYTHONSAFEPATH") else [""]
    places = [*here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    found = importlib.machinery.PathFinder.find_spec("launcher", places)
    ours = launcher.__file__
    assert ours is not None
    # A folder without __init__.py hides nothing, and has no origin.
    if found is not None and found.origin and not os.path.samefile(found.origin, ours):
        raise UserError(
            f"{found.origin} hides shardscale's own package of that name from the ranks: rename "
            "it, or start from another folder"
        )
