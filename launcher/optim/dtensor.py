"""DTensors, told from other tensors without importing what makes them."""

import sys
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(tensor: Tensor) -> "TypeIs[DTensor]":
    """Whether it is sharded over a mesh, as FSDP's are.

    The import takes as long as half of torch's own, and most strategies never need it: where nobody
    has imported DTensor, there is none.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor; any other tensor as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor
