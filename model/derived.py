"""Tensors that backward computes again from what is kept anyway, where autograd would save both.

Selective checkpointing of the project's own blocks, whose matmuls are kept: what is left to compute
again are norms, activations and casts, each by itself when its backward comes. `selective` has the
general way, which runs a whole block again under a dispatch mode.
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
"""Makes a tensor once more, with the same bits."""


class _Derived(NamedTuple):
    """What is saved in place of a tensor."""

    compute: Compute
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Notes:
    """How to compute tensors again, by their memory."""

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
    """Within, backward is left no tensor that was noted as `derived`."""
    notes = _Notes()
    token = _NOTES.set(notes)
    try:
        with saved_tensors_hooks(notes.pack, _unpack):
            yield
    finally:
        _NOTES.reset(token)


def derives() -> bool:
    """Return whether what is noted is not saved here."""
    return not torch.compiler.is_compiling() and _NOTES.get() is not None


def derived(tensor: Tensor, compute: Compute) -> None:
    """Note that compute() gives `tensor` again, from what is saved anyway; not what it is a view
    of."""
    if derives():
        notes = _NOTES.get()
        assert notes is not None
        notes.note(tensor, compute)


def sparing(tensor: Tensor, compute: Compute) -> contextlib.AbstractContextManager[object]:
    """Within, backward is left no `tensor`, which compute() gives again."""
    notes = _Notes()
    notes.note(tensor, compute)
    return saved_tensors_hooks(notes.pack, _unpack)
