"""Act on a module right after its import, and never before the program itself imports it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any


def after_import(name: str, act: Callable[[Any], object]) -> None:
    """Call `act` with the module once it has been imported; never if it was already."""
    if name not in sys.modules:
        sys.meta_path.insert(0, _After(name, act))


class _After:
    """Finds a module as Python would; its loader calls back once when the import is complete."""

    def __init__(self, name: str, act: Callable[[Any], object]) -> None:
        self._name = name
        self._act = act
        self._asks = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the module's own spec; None for all other modules."""
        if name != self._name or self._asks:
            return None
        # `importlib.util.find_spec` asks this finder again
        self._asks = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asks = False
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_then_act(module: Any) -> None:
            loader.__dict__.pop("exec_module", None)  # the loader is as it was, whatever comes
            # Not before: a program that looks whether the module is there does not import it yet.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            execute(module)
            self._act(module)

        loader.exec_module = execute_then_act
        return spec
