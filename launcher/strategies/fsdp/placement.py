"""The division of a parameter among FSDP's ranks."""

import math
from collections.abc import Sequence
from typing import Final

MOST_UNEVEN: Final = 1.25
"""The largest shard of experts to an even one, up to which they are divided one by one."""


def sharded_dimension(shape: Sequence[int], ranks: int) -> int:
    """Return the dimension that is divided: rows, unless they are experts.

    Of experts [E, n, m], more ranks than E would leave most ranks without any, so n or m is
    divided. torch takes only an even division there, and copies such a parameter once more after
    each gather and before each reduction (torch/distributed/fsdp/_fully_shard/_fsdp_param.py,
    _fsdp_collectives.py).
    """
    if len(shape) == 3 and -(-shape[0] // ranks) * ranks > MOST_UNEVEN * shape[0]:
        for dimension in (1, 2):
            if shape[dimension] % ranks == 0:
                return dimension
    return 0


def shard_shapes(
    shape: Sequence[int], *, rank: int, ranks: int, dimension: int = 0
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (shape, shape with padding) of a rank's shard: `torch.chunk` along the dimension."""
    padded = -(-shape[dimension] // ranks)
    own = max(0, min(padded, shape[dimension] - rank * padded))
    before, after = shape[:dimension], shape[dimension + 1 :]
    return (*before, own, *after), (*before, padded, *after)


def row_range(shape: Sequence[int], *, rank: int, ranks: int) -> tuple[int, int]:
    """Return (first, number) of the elements in a rank's rows."""
    (own, *_), (padded, *_) = shard_shapes(shape, rank=rank, ranks=ranks)
    return min(shape[0], rank * padded) * math.prod(shape[1:]), own * math.prod(shape[1:])
