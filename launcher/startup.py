"""How what people start begins and ends: no garbage is collected while modules are imported, and a
reader of its output may leave early.

Imports leave some 300,000 objects behind, which stay. Python's collector would look through them
again and again as they come in, and now and then while training, on one rank with the others
waiting (bench/startup.py).
"""

import contextlib
import gc
import importlib.machinery
import os
import sys
from collections.abc import Iterator

import launcher
from launcher.errors import UserError


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


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """End the process well if nobody reads on: `shardscale plan ... | head` has what it wanted."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


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
