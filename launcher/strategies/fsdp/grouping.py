"""Groups of parameters that FSDP gathers and reduces together.

One per block, or per few small ones on a GPU; one for an untied head and the norm before it; and
the root with the rest.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal

from launcher.model.parts import block_of
from launcher.util.sizes import MIB

Group = range | Literal["root", "head"]
"""The blocks of a range of layers, or what is not of a block."""

ROOT: Final = "root"
HEAD: Final = "head"

SHARED_BYTES: Final = {"cuda": 64 * MIB}
"""Device -> most bytes that blocks have together, as they compute, to be one group.

Python takes as long for a group of 1 MiB as for one of 100, and a GPU waits for it (12 blocks of
14 MiB: bench/results/step_budget.md); what a larger one holds and delays is small beside 64 MiB.
"""


def block_groups(
    sizes_bytes: Sequence[int], device_type: str, *, together: bool = True
) -> list[range]:
    """Layers of each group, from the bytes of each block as it computes.

    Args:
        together: False for other trainers, which gather each block by itself.
    """
    limit_bytes = SHARED_BYTES.get(device_type, 0) if together else 0
    groups: list[range] = []
    held_bytes = 0
    for layer, size_bytes in enumerate(sizes_bytes):
        held_bytes += size_bytes
        if groups and held_bytes <= limit_bytes:
            groups[-1] = range(groups[-1].start, layer + 1)
        else:
            groups.append(range(layer, layer + 1))
            held_bytes = size_bytes
    return groups


def groups_of(names: Iterable[str], blocks: Sequence[range], *, tied: bool) -> Iterator[Group]:
    """Group of each parameter, whose names are in the order of the model.

    A tied head must share the group of the embedding, the root.

    Args:
        blocks: layers of each group of them.
    """
    by_layer = {layer: group for group in blocks for layer in group}
    behind_blocks = False
    for name in names:
        layer = block_of(name)
        if layer is not None:
            behind_blocks = True
            yield by_layer[layer]
        else:
            yield HEAD if behind_blocks and not tied else ROOT


def reshards(group: Group, *, reshard_after_forward: bool, tied: bool) -> bool:
    """Return whether a group's gathered parameters are freed after its forward.

    The backward starts with the head, so freeing that only costs a gather.
    """
    with_head = group == HEAD or (group == ROOT and tied)
    return reshard_after_forward and not with_head
