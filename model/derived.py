"""Marks in the code of a block that selective checkpointing goes by.

Of the project's own blocks autograd saves the matmuls, and `derived` tensors (norms, activations,
casts) are recomputed one by one when their backward needs them. `selective` has the general way,
which reruns a whole block under a dispatch mode; `as_one` and `seen` mark what that looks at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")
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
SELECTIVE: ContextVar[Any] = ContextVar("SELECTIVE", default=None)
"""The dispatch mode of the block that runs, if `selective` keeps its products."""


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


def as_one(compute: Callable[[], T], *, attention: bool = False) -> T:
    """Run `compute`, without autograd, as one operator: a block's next linear product, or its
    attention. Selective checkpointing keeps its result, and nothing inside."""
    mode = None if torch.compiler.is_compiling() else SELECTIVE.get()
    return compute() if mode is None else mode.as_one(compute, attention)


def seen(function: Callable[..., T]) -> Callable[..., T]:
    """Wrap a function whose operators pass the dispatch mode of selective checkpointing, also where
    those of others do not (`selective_contexts`)."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> T:
        mode = None if torch.compiler.is_compiling() else SELECTIVE.get()
        with mode if mode is not None and not mode.sees else contextlib.nullcontext():
            return function(*args, **kwargs)

    return call


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
