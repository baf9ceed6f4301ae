"""What people start imports through this: no garbage is collected meanwhile.

Imports leave some 300,000 objects behind, which stay. Python's collector would look through them
again and again as they come in, for a fifth of a process's start, and again while training: a
quarter of a second each time, on one rank, with the others waiting.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Hold the collector back; from then on it passes over all that there is by now."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
