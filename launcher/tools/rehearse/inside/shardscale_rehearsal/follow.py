"""A dispatch mode that computes on the host what the device's kernels would have."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_void_p
from typing import Any

import torch
from shardscale_observer.held import held, hold, on_device
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves, tree_map

from shardscale_rehearsal.timeline import PLAIN

MOST_BYTES = 1 << 16  # what library/kept.h keeps for as long as it is there
DEPENDS_ON_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def call_followed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function in this mode, unless it or fake tensors, which have no values, are on."""
    modes = _get_current_dispatch_mode_stack()
    if any(isinstance(mode, (Follow, FakeTensorMode)) for mode in modes):
        return function(*args, **kwargs)
    with Follow(ctypes.CDLL(None)):
        return function(*args, **kwargs)


class Follow(TorchDispatchMode):
    """Know after each operator of a thread what its results are, if its inputs were known."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        self._library = library

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator; where it has launched a kernel, on the host, too."""
        arguments = (args, kwargs or {})
        if any(type_ not in PLAIN for type_ in types):
            return NotImplemented  # it will call the operators of its parts
        # before the call, which may change its arguments in place
        host = tree_map(self._on_host, arguments)
        inputs = _on_device(arguments)
        known = all(self._on_host(tensor) is not None for tensor in inputs)
        sized = known and inputs and not DEPENDS_ON_VALUES.isdisjoint(func.tags)
        if sized and (computed := _on_the_host(func, host)) is not None:
            return tree_map(lambda one: _like(inputs[0].device, one), computed)
        launches = self._library.device_launches()
        results = func(*arguments[0], **arguments[1])
        launched = self._library.device_launches() != launches
        writes = func._schema.is_mutable
        if func.is_view and not writes:
            return results
        leaves = tree_leaves(results)
        random = torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.name()
        computed = _on_the_host(func, host) if known and not random else None
        values = [None] * len(leaves) if computed is None else tree_leaves(computed)
        for index, tensor in enumerate(leaves):
            if not (torch.is_tensor(tensor) and tensor.is_cuda):
                continue
            its = values[index]
            if launched:  # of a copy or a message the library itself knows
                self._set_values(tensor, its)
            if its is not None:
                hold(tensor, its, written=writes)
        return results

    def _on_host(self, value: Any) -> Any:
        """The argument for the host; None for a tensor whose values are not known."""
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not (torch.is_tensor(value) and value.is_cuda):
            return value
        if (values := held(value)) is not None:
            return values
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


def _on_the_host(func: Any, arguments: Any) -> Any:
    """Run an operator apart from the modes of the program's thread, as nothing of its own; None for
    one that is not to be had here: a message, or more room in memory that does not grow."""
    if func.namespace != "aten" or func.overloadpacket is torch.ops.aten.resize_:
        return None
    with _disable_current_modes():
        return func(*arguments[0], **arguments[1])


def _like(device: Any, value: Any) -> Any:
    return on_device(value, device) if torch.is_tensor(value) else value
