"""Follow what saves checkpoints besides torch.save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardscale_after import after_import

_FUNCTIONS = {
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save"),
    "safetensors.torch": ("save_file",),
}
"""Module -> its functions."""


def follow_saves(within: Callable[[str, Any], Any]) -> None:
    """Have each of them run in the phase `checkpoint` once its module is imported."""

    def follow(module: Any) -> None:
        for name in _FUNCTIONS[module.__name__]:
            setattr(module, name, within("checkpoint", getattr(module, name)))

    for module in _FUNCTIONS:
        after_import(module, follow)
