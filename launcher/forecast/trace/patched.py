"""Other functions in the place of torch's and a model's, while a trace is recorded."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def patched(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Give attributes of modules other values: (module, name, value)."""
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
