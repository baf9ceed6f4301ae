"""Let torch.compile fold constants on the host: it computes them on the device and reads them."""

from __future__ import annotations

import functools
from typing import Any


def prepare(module: Any) -> None:
    """Compute what torch.compile replaces by one number, where numbers are known."""
    folder: Any = getattr(module, "UniformValueConstantFolder", None)
    if folder is not None:
        folder.run = _on_the_host(folder.run)


def _on_the_host(run: Any) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map

    class OnTheHost(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            arguments, named = tree_map(_of_the_host, (args, kwargs or {}))
            return func(*arguments, **named)

    @functools.wraps(run)
    def folded(folder: Any) -> Any:
        with OnTheHost():
            return run(folder)

    return folded


def _of_the_host(value: Any) -> Any:
    import torch

    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.cpu() if torch.is_tensor(value) and value.is_cuda else value
