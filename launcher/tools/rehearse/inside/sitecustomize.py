"""Prepare a rehearsed program's torch.distributed, then hand over to its own sitecustomize.

Python imports this file at startup because its folder is on PYTHONPATH.
"""

import contextlib
import os
import sys


def _hand_over() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    # The program shall see the path that it would have seen. Children get it by PYTHONPATH.
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    ours = sys.modules.pop(__name__)
    try:
        __import__(__name__)
    except ModuleNotFoundError as error:
        if error.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, ours)


if __name__ == "sitecustomize":
    with contextlib.suppress(Exception):
        import shardscale_values

        shardscale_values.begin()
    _hand_over()
