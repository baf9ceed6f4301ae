"""Hold values of small tensors on the null GPU for as long as nothing writes to them.

Its library forgets all values at the next kernel, which may have written anywhere. torch counts
what operators write to a tensor, and the library sees copies and messages; so what the host has
sent, such as the sizes of a batch's images, is known until one of them changes it.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_size_t, c_void_p
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

MOST_BYTES = 1 << 20
"""Bytes of one tensor of whole numbers or booleans; others are results, and not read."""
_INFERENCE = -1
_versions: dict[int, tuple[Any, int]] = {}
"""A storage's number -> (weak reference, version of its tensors whose values are held)."""


@functools.cache
def _library() -> Any:
    """Return the null GPU's."""
    library = ctypes.CDLL(None)
    library.shardscale_recall_held.restype = c_size_t
    return library


def hold(tensor: Any, values: Any, *, written: bool = False) -> None:
    """Hold `values`, on the host and of the tensor's shape, as what the tensor has now.

    `written`: an operator has just written them into the tensor, which torch counts afterwards.
    """
    if not is_small(tensor) or not tensor.is_contiguous():
        return
    storage = tensor.untyped_storage()
    version = _version(tensor)
    if not _is_at(storage, version):  # nothing else of it is known
        _library().shardscale_release(c_void_p(storage.data_ptr()), c_size_t(storage.nbytes()))
        for number in [n for n, (weak, _) in _versions.items() if weak.expired()]:
            del _versions[number]
    values = values.to(tensor.dtype).contiguous()
    span = c_void_p(tensor.data_ptr()), c_void_p(values.data_ptr()), c_size_t(_span(tensor))
    _library().shardscale_hold(*span)
    counted = version + 1 if written and version != _INFERENCE else version
    _versions[storage._cdata] = StorageWeakRef(storage), counted


def held(tensor: Any) -> Any:
    """Return a tensor's values on the host; None if they are not known."""
    if not is_small(tensor) or not _is_at(tensor.untyped_storage(), _version(tensor)):
        return None
    raw = bytearray(_span(tensor))
    buffer = (ctypes.c_char * len(raw)).from_buffer(raw)
    size = c_size_t(len(raw))
    if _library().shardscale_recall_held(c_void_p(tensor.data_ptr()), buffer, size) < len(raw):
        return None
    found = torch.frombuffer(raw, dtype=tensor.dtype)
    return found.as_strided(tensor.shape, tensor.stride())


def on_device(values: Any, device: Any) -> Any:
    """Return a new tensor on the device, as if a kernel had computed these values."""
    computed = torch.empty_like(values, device=device)
    hold(computed, values)
    return computed


def is_small(tensor: Any) -> bool:
    """Return True for a tensor whose values a program may read to find its way."""
    whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    return whole and bool(tensor.numel()) and _span(tensor) <= MOST_BYTES


def _span(tensor: Any) -> int:
    """Return the bytes from its first element to its last, whatever lies between them."""
    last = sum((size - 1) * tensor.stride(axis) for axis, size in enumerate(tensor.shape))
    return int((last + 1) * tensor.element_size())


def _is_at(storage: Any, version: int) -> bool:
    weak, known = _versions.get(storage._cdata, (None, None))
    return weak is not None and not weak.expired() and known == version


def _version(tensor: Any) -> int:
    """Return how often the tensor was written to, which torch counts outside of inference."""
    return _INFERENCE if tensor.is_inference() else int(tensor._version)
