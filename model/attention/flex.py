"""Where FlexAttention can run."""

from __future__ import annotations

import importlib.util

from launcher.model.attention.kernel import FIX, Setting

SMALLEST_HEAD = 16


def obstacle(setting: Setting) -> str | None:
    """Why FlexAttention cannot run in a setting, with the fix."""
    if setting.device_type != "cuda":
        return f"attention flex has no backward on {setting.device_type} (torch's limit); {FIX}."
    if setting.dropout > 0.0:
        return f"attention flex cannot drop attention weights (dropout {setting.dropout}); {FIX}."
    if setting.head_size < SMALLEST_HEAD:
        return (
            f"attention flex takes head sizes from {SMALLEST_HEAD}, not {setting.head_size}; {FIX}."
        )
    if setting.capability is not None and setting.capability < (7, 0):
        capability = ".".join(map(str, setting.capability))
        return f"attention flex needs compute capability 7.0, this GPU has {capability}; {FIX}."
    return None


def missing(setting: Setting) -> str | None:
    """What to install where FlexAttention cannot compile its kernel."""
    if importlib.util.find_spec("triton") is not None:
        return None
    return f"attention flex compiles with triton, which is missing: pip install triton, or {FIX}."
