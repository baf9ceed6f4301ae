"""Saved experts of stage 3: by their place among parameters, not as values.

DeepSpeed has a function of its own for Linears, which saves no gathered weight. Experts are one
parameter, of which grouped products save a view: what was gathered for one block would stay until
its backward, and with it that of all blocks. It is gathered again by then.
"""

import contextlib
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

_Place = tuple[Tensor, tuple[int, ...], tuple[int, ...], int]
"""A view of a parameter: the parameter, size, stride, and offset from where it begins."""


def saving_places(module: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Have the block's forward save views of experts as places; nothing where there are none."""
    experts: list[Tensor] = [
        p for p in module.parameters() if len(getattr(p, "ds_shape", p.shape)) > 2
    ]
    if not experts:
        return contextlib.nullcontext()

    def pack(saved: Tensor) -> Tensor | _Place:
        if saved.dim() < 3:
            return saved
        storage = saved.untyped_storage()._cdata
        for each in experts:
            # A released parameter is an empty tensor, with a storage of its own.
            if each.numel() and each.untyped_storage()._cdata == storage:
                offset = int(saved.storage_offset() - each.storage_offset())
                return each, tuple(saved.size()), saved.stride(), offset
        return saved

    def unpack(kept: Tensor | _Place) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        parameter, size, stride, offset = kept
        return parameter.detach().as_strided(size, stride, parameter.storage_offset() + offset)

    return saved_tensors_hooks(pack, unpack)
