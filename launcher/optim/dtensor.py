"""Tests for DTensors that do not import torch.distributed.tensor."""

import sys
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(tensor: Tensor) -> "TypeIs[DTensor]":
    """Return whether a tensor is sharded over a mesh, as FSDP's are.

    Importing DTensor takes half as long as torch itself, and most strategies never need it: unless
    it is imported, there is none.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor
