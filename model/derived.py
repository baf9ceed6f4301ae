"""Tensors that backward recomputes one by one, from others that autograd saves anyway.

Selective checkpointing of the project's own blocks, whose matmuls are saved: norms, activations and
casts are recomputed when their backward needs them. `selective` has the general way, which reruns a
whole block under a dispatch mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

Compute = Callable[[], Tensor]
"""Recomputes a tensor, with the same bits."""


class _Derived(NamedTuple):
    """Placeholder that autograd saves instead of a tensor."""

    compute: Compute
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Notes:
    """Registry of tensors to recompute, by their storage."""

    def __init__(self) -> None:
        self._computes: dict[int, Compute] = {}
        # No later storage is where one of these was.
        self._storages: list[StorageWeakRef] = []

    def note(self, tensor: Tensor, compute: Compute) -> None:
        storage = tensor.untyped_storage()
        self._computes[storage._cdata] = compute
        self._storages.append(StorageWeakRef(storage))

    def pack(self, saved: Tensor) -> Tensor | _Derived:
        compute = self._computes.get(saved.untyped_storage()._cdata)
        if compute is None:
            return saved
        return _Derived(compute, tuple(saved.size()), saved.stride(), int(saved.storage_offset()))


def _unpack(kept: Tensor | _Derived) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    with torch.no_grad():
        tensor = kept.compute()
        if tensor.size() == kept.size and tensor.stride() == kept.stride:
            return tensor
        return tensor.as_strided(kept.size, kept.stride, kept.offset)


_NOTES: ContextVar[_Notes | None] = ContextVar("_NOTES", default=None)


@contextlib.contextmanager
def deriving() -> Iterator[None]:
    """Have autograd save placeholders for tensors that are noted as `derived` inside."""
    notes = _Notes()
    token = _NOTES.set(notes)
    try:
        with saved_tensors_hooks(notes.pack, _unpack):
            yield
    finally:
        _NOTES.reset(token)


def derives() -> bool:
    """Return whether noted tensors are recomputed here."""
    return not torch.compiler.is_compiling() and _NOTES.get() is not None


def derived(tensor: Tensor, compute: Compute) -> None:
    """Note that compute() recomputes `tensor` from what is saved anyway.

    It must own its storage: each saved view of that is taken from what compute() returns.
    """
    if derives():
        notes = _NOTES.get()
        assert notes is not None
        notes.note(tensor, compute)


def sparing(tensor: Tensor, compute: Compute) -> contextlib.AbstractContextManager[object]:
    """Have autograd save no `tensor` inside; backward recomputes it with compute()."""
    notes = _Notes()
    notes.note(tensor, compute)
    return saved_tensors_hooks(notes.pack, _unpack)
