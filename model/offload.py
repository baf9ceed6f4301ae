"""Keep what backward needs of a block, its input, in host memory instead of on the GPU.

The copy out runs beside the block's own forward, the copy back beside the backward of the block
after it. On a CPU everything is in host memory already: there the same steps only copy.
"""

import weakref
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Stored:
    """One saved tensor; `before` was stored just before it, so it is wanted just after it."""

    device: torch.device
    host: Tensor
    before: "_Stored | None"
    stored: torch.cuda.Event | None = None
    fetched: Tensor | None = None
    arrived: torch.cuda.Event | None = None

    def fetch(self) -> None:
        """Begin to copy back to the device."""
        if self.fetched is not None:
            return
        if self.stored is None:
            self.fetched = self.host
            return
        with torch.cuda.stream(_side_stream(self.device)):
            self.stored.wait()
            self.fetched = self.host.to(self.device, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()


def offload_saved() -> saved_tensors_hooks:
    """Make a context in which tensors that autograd saves go to (page-locked) host memory."""
    return saved_tensors_hooks(_store, _restore)


# Weak, as `before` is not: a step's last tensor would keep all of its chain in host memory.
_latest: "weakref.ref[_Stored] | None" = None


def _store(tensor: Tensor) -> _Stored:
    global _latest
    before = None if _latest is None else _latest()
    on_gpu = tensor.is_cuda
    host = torch.empty_like(tensor, device="cpu", pin_memory=on_gpu)
    stored = _Stored(device=tensor.device, host=host, before=before)
    if on_gpu:
        side = _side_stream(tensor.device)
        side.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(side):
            host.copy_(tensor, non_blocking=True)
            stored.stored = torch.cuda.Event()
            stored.stored.record()
        tensor.record_stream(side)  # its memory is not reused before the copy is done
    else:
        host.copy_(tensor)
    _latest = weakref.ref(stored)
    return stored


def _restore(stored: _Stored) -> Tensor:
    stored.fetch()
    tensor = stored.fetched
    assert tensor is not None
    stored.fetched = None
    if stored.arrived is not None:
        current = torch.cuda.current_stream(stored.device)
        current.wait_event(stored.arrived)
        tensor.record_stream(current)
    if stored.before is not None:
        stored.before.fetch()
        stored.before = None
    return tensor


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
