"""A dispatch mode that computes on the host what the device's kernels would have."""

from __future__ import annotations

from ctypes import c_void_p
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

MOST_BYTES = 1 << 16  # what library/kept.h keeps for as long as it is there


class Follow(TorchDispatchMode):
    """Know after each operator of a thread what its results are, if its inputs were known."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        self._library = library

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator; where it has launched a kernel, on the host, too."""
        arguments = (args, kwargs or {})
        # before the call, which may change its arguments in place
        host = tree_map(self._on_host, arguments)
        known = all(self._on_host(tensor) is not None for tensor in _on_device(arguments))
        launches = self._library.device_launches()
        results = func(*arguments[0], **arguments[1])
        if self._library.device_launches() == launches:
            return results  # a view, a copy or a message: the library itself knows
        outputs = _on_device(results)
        values: list[Any] = [None] * len(outputs)
        if known and torch.Tag.nondeterministic_seeded not in func.tags:
            values = [t for t in tree_leaves(func(*host[0], **host[1])) if torch.is_tensor(t)]
        for index, tensor in enumerate(outputs):
            self._set_values(tensor, values[index])
        return results

    def _on_host(self, value: Any) -> Any:
        """The argument for the host; None for a tensor whose values are not known."""
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not (torch.is_tensor(value) and value.is_cuda):
            return value
        bytes_ = value.numel() * value.element_size()
        if not value.is_contiguous() or bytes_ > MOST_BYTES:
            return None
        values = torch.empty(value.shape, dtype=value.dtype)
        span = map(c_void_p, (value.data_ptr(), values.data_ptr(), bytes_))
        return values if self._library.shardscale_recall(*span) == bytes_ else None

    def _set_values(self, tensor: Any, values: Any) -> None:
        if values is None or not tensor.is_contiguous():
            storage = tensor.untyped_storage()
            self._library.shardscale_forget(*map(c_void_p, (storage.data_ptr(), storage.nbytes())))
            return
        values = values.contiguous()
        bytes_ = values.numel() * values.element_size()
        span = (tensor.data_ptr(), values.data_ptr(), bytes_)
        self._library.shardscale_keep(*map(c_void_p, span))


def _on_device(tree: Any) -> list[Any]:
    return [value for value in tree_leaves(tree) if torch.is_tensor(value) and value.is_cuda]
