"""How what people start begins and ends: no garbage is collected while modules are imported,
libraries say what was asked for, and a reader of the output may leave early.

Imports leave some 300,000 objects behind, which stay. Python's collector would look through them
again and again as they come in, and now and then while training, on one rank with the others
waiting (bench/startup.py).
"""

import contextlib
import gc
import logging
import os
import sys
from collections.abc import Iterator


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
