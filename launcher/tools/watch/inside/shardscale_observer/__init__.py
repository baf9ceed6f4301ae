"""The observer: acts once the program has imported torch, and never before.

Everything runs guarded: a failure in here is noted in the records, and the program continues. Must
work with Python 3.9 and torch 2.4, so annotations stay text.
"""

from __future__ import annotations

import json
import os
from typing import Any

from shardscale_after import after_import

VARIABLE = "SHARDSCALE_OBSERVER"
"""Environment variable with the settings, a JSON object."""


def begin() -> None:
    """Arrange for the observer to be installed after `import torch`, if there are settings."""
    text = os.environ.get(VARIABLE)
    if text:
        settings = json.loads(text)
        after_import("torch", lambda torch: _install(torch, settings))


def _install(torch: Any, settings: dict[str, Any]) -> None:
    from shardscale_observer.guard import guarded
    from shardscale_observer.hooks import install

    guarded(install)(torch, settings)
