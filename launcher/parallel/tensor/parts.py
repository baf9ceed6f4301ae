"""What a rank has of a model whose matrices are cut, and who else has the same."""

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.parallel.tensor.cut import Cut
from launcher.parallel.tensor.group import TensorGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """A rank's part of each parameter."""

    tensor_group: TensorGroup
    """The ranks that have the other parts."""
    cuts: Mapping[str, Cut]
    """Name -> which part."""
    copy: int
    copies: int
    """Ranks that have the same parts, or shards of them, and which of them this is."""
