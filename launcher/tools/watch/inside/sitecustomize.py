"""Start what is asked for in this interpreter, then hand over to the program's own sitecustomize.

Python imports this file at startup because its folder is on PYTHONPATH. The folder of a rehearsal's
own code stands beside it there.
"""

import contextlib
import importlib
import os
import sys


def _start() -> "set[str]":
    """Begin what there is; return its folders."""
    folders = {os.path.dirname(os.path.abspath(__file__))}
    for name in ("shardscale_rehearsal", "shardscale_observer"):
        # a fault in here must not keep any program of this interpreter from starting
        with contextlib.suppress(Exception):
            package = importlib.import_module(name)
            folders.add(os.path.dirname(os.path.dirname(os.path.abspath(package.__file__ or ""))))
            package.begin()
    return folders


def _hand_over(folders: "set[str]") -> None:
    # The program shall see the path that it would have seen. Children get it by PYTHONPATH.
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) not in folders]
    # for the import below to look for the one of the program
    ours = sys.modules.pop(__name__)
    try:
        __import__(__name__)
    except ModuleNotFoundError as error:
        if error.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, ours)


if __name__ == "sitecustomize":
    _hand_over(_start())
