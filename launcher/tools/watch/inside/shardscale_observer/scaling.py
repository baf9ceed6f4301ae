"""Losses as they were before a GradScaler scaled them: backward gets 65,536 times as much."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from shardscale_observer.guard import guarded

_UNSCALED = "_shardscale_unscaled"
"""Attribute of a scaled loss."""


def follow_scaler(torch: Any, replace: Callable[[Any, str, Any], None]) -> None:
    """Note the loss beside each scaled one; `replace` sets an attribute until hooks are removed."""
    scale = torch.amp.GradScaler.scale

    @guarded
    def note(loss: Any, scaled: Any) -> None:
        if scaled is not loss and isinstance(loss, torch.Tensor) and loss.numel() == 1:
            setattr(scaled, _UNSCALED, loss.detach())

    @functools.wraps(scale)
    def scale_noting(scaler: Any, outputs: Any) -> Any:
        scaled = scale(scaler, outputs)
        if not torch.compiler.is_compiling():
            note(outputs, scaled)
        return scaled

    replace(torch.amp.GradScaler, "scale", scale_noting)


def unscaled(loss: Any) -> Any:
    """Return a loss as the program has it, whether or not it was scaled."""
    return getattr(loss, _UNSCALED, loss)
