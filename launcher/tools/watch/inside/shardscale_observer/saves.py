"""Follow what saves checkpoints besides torch.save, and what loads them between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardscale_after import after_import

_FUNCTIONS = {
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save"),
    "safetensors.torch": ("save_file",),
}
"""Module -> its functions that save."""
_LOADER = "torch.distributed.checkpoint.state_dict_loader"


def follow_saves(within: Callable[..., Any]) -> None:
    """Have each of them run in the phase `checkpoint` once its module is imported; what loads, only
    beside a step whose seconds are counted: to the bytes of a run it is no save."""

    def follow(module: Any) -> None:
        for name in _FUNCTIONS[module.__name__]:
            setattr(module, name, within("checkpoint", getattr(module, name)))

    def follow_load(module: Any) -> None:
        module.load = within("checkpoint", module.load, timed_only=True)

    for module in _FUNCTIONS:
        after_import(module, follow)
    after_import(_LOADER, follow_load)
