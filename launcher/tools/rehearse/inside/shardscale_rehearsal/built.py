"""Stand in for operators that DeepSpeed compiles with nvcc, which a machine without GPUs lacks.

The compiled code of these optimizers updates tensors in place and allocates nothing, so it is left
out as any kernel is.
"""

from __future__ import annotations

import types
from typing import Any

UPDATES = {
    "FusedAdamBuilder": "multi_tensor_adam",
    "FusedLionBuilder": "multi_tensor_lion",
    "FusedLambBuilder": "lamb",
}
"""Builder -> the function that its operator has."""


def prepare(module: Any) -> None:
    """Make the builders load operators that launch nothing."""
    for builder, function in UPDATES.items():
        found = getattr(module, builder, None)
        if isinstance(found, type):
            operator = types.SimpleNamespace(**{function: _update})
            found.load = lambda self, verbose=True, operator=operator: operator  # type: ignore[attr-defined]


def _update(*args: Any) -> None:
    """Be one kernel, after which no value on the device is known."""
    import torch

    from shardscale_rehearsal.timeline import as_kernel

    as_kernel("update", args, lambda: torch.cuda._sleep(1))
