"""Follow the ways in which a process of the program ends."""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from shardscale_observer.leaving import exit_now


def follow_endings(fails: Callable[[BaseException], None], ends: Callable[[str], None]) -> None:
    """Call `fails` with an error that ends this process, or a child, and `ends` before its end."""
    before = sys.excepthook
    noted: set[int] = set()  # ids: an error holds the tensors of its frames

    def hook(kind: Any, error: Any, trace: Any) -> None:
        noted.add(id(error))
        fails(error)
        before(kind, error, trace)

    def at_exit() -> None:
        # set by Python for whatever hook prints the error: rich and typer have their own
        error = getattr(sys, "last_value", None)
        if error is not None and id(error) not in noted:
            fails(error)
        ends("exit")

    def exit_at_once(status: int) -> None:
        ends("os._exit")
        exit_now(status)

    sys.excepthook = hook
    os._exit = exit_at_once  # type: ignore[assignment]
    atexit.register(at_exit)
    _follow_children(fails)


def _follow_children(fails: Callable[[BaseException], None]) -> None:
    """Note errors of child processes, such as those of mp.spawn: they print them in their own way,
    past sys.excepthook."""

    def noting(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                fails(error)
                raise

        return call

    spawn: Any = importlib.import_module("torch.multiprocessing.spawn")
    wrap = spawn._wrap

    @functools.wraps(wrap)  # a child finds it by its name
    def wrap_noting(function: Any, *args: Any) -> None:
        wrap(noting(function), *args)

    spawn._wrap = wrap_noting
    process: Any = importlib.import_module("multiprocessing.process").BaseProcess
    process.run = noting(process.run)
