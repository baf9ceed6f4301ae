"""Groups of parameters that FSDP gathers and reduces together.

One per block, one for an untied head and the norm before it, and the root with the rest.
"""

from collections.abc import Iterable, Iterator

from launcher.model.parts import block_of

ROOT, HEAD = "root", "head"


def groups_of(names: Iterable[str], *, tied: bool) -> Iterator[str]:
    """Group of each parameter, whose names are in the order of the model.

    A tied head must share the group of the embedding, the root.
    """
    behind_blocks = False
    for name in names:
        layer = block_of(name)
        if layer is not None:
            behind_blocks = True
            yield f"block {layer}"
        else:
            yield HEAD if behind_blocks and not tied else ROOT


def reshards(group: str, *, reshard_after_forward: bool, tied: bool) -> bool:
    """Return whether a group's gathered parameters are freed after its forward.

    The backward starts with the head, so freeing that only costs a gather.
    """
    with_head = group == HEAD or (group == ROOT and tied)
    return reshard_after_forward and not with_head
