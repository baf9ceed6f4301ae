"""Support torch.distributed in a rehearsal: values of small tensors, and a world of one rank.

torch's object collectives send sizes, add them up on the device, and read them: with a wrong sum
they fail. Must work with Python 3.9 and torch 2.4, so annotations stay text.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

MODULE = "torch.distributed.distributed_c10d"
OBJECT_COLLECTIVES = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)


def begin() -> None:
    """Arrange for the object collectives to be followed once torch has defined them."""
    if hasattr(ctypes.CDLL(None), "shardscale_follow") and MODULE not in sys.modules:
        sys.meta_path.insert(0, _AfterModule())


class _AfterModule:
    """Finds the module as Python would, and wraps its functions when its import is complete."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the module's own spec, whose loader wraps once; None for all other modules."""
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_then_wrap(module: Any) -> None:
            loader.__dict__.pop("exec_module", None)
            execute(module)
            for function in OBJECT_COLLECTIVES:
                if hasattr(module, function):
                    setattr(module, function, _followed(getattr(module, function)))
            if os.environ.get("SHARDSCALE_STAND_IN_ALONE") == "1":
                module.init_process_group = _alone(module.init_process_group)

        loader.exec_module = execute_then_wrap
        return spec


def _followed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def follow(*args: Any, **kwargs: Any) -> Any:
        library = ctypes.CDLL(None)
        library.shardscale_follow(True)
        try:
            from shardscale_values.follow import Follow

            with Follow(library):
                return function(*args, **kwargs)
        finally:
            library.shardscale_follow(False)

    return follow


def _alone(init_process_group: Callable[..., Any]) -> Callable[..., Any]:
    """Start a group without the other ranks of the environment's world."""

    @functools.wraps(init_process_group)
    def init(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        from torch.distributed import HashStore

        kwargs.pop("init_method", None)
        kwargs.setdefault("rank", int(os.environ["RANK"]))
        kwargs.setdefault("world_size", int(os.environ["WORLD_SIZE"]))
        return init_process_group(backend, store=HashStore(), **kwargs)

    return init
