"""The observer: acts once the program has imported torch, and never before.

Everything runs guarded: a failure in here is noted in the records, and the program continues. Must
work with Python 3.9 and torch 2.4, so annotations stay text.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from typing import Any

VARIABLE = "SHARDSCALE_OBSERVER"
"""Environment variable with the settings, a JSON object."""


def begin() -> None:
    """Arrange for the observer to be installed after `import torch`, if there are settings."""
    text = os.environ.get(VARIABLE)
    if text and "torch" not in sys.modules:
        sys.meta_path.insert(0, _AfterTorch(json.loads(text)))


class _AfterTorch:
    """Finds torch as Python would, and installs the observer when its import is complete."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return torch's own spec, whose loader calls back once; None for all other modules."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_then_install(module: Any) -> None:
            del loader.exec_module  # the loader is as it was, whatever comes
            execute(module)
            self._install(module)

        loader.exec_module = execute_then_install
        return spec

    def _install(self, torch: Any) -> None:
        from shardscale_observer.guard import guarded
        from shardscale_observer.hooks import install

        guarded(install)(torch, self._settings)
