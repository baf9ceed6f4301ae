"""Which parameters FSDP gathers and reduces together: one group per block, one for an untied head
and the norm before it, and the root, which holds the rest."""

ROOT, HEAD = "root", "head"
_HEAD_MODULES = ("ln_f", "head")


def head_modules(*, tied: bool) -> tuple[str, ...]:
    """Modules of the head's own group; a tied weight must share the embedding's, the root's."""
    return () if tied else _HEAD_MODULES


def group_of(parameter: str, *, tied: bool) -> str:
    """`blocks.3.mlp.fc.weight` -> `blocks.3`; else `head` or `root`."""
    first, *rest = parameter.split(".")
    if first == "blocks":
        return f"blocks.{rest[0]}"
    return HEAD if first in head_modules(tied=tied) else ROOT


def reshards(group: str, *, reshard_after_forward: bool, tied: bool) -> bool:
    """Whether a group's whole parameters are freed after its forward. The backward starts with the
    head, so freeing that only costs a gather."""
    with_head = group == HEAD or (group == ROOT and tied)
    return reshard_after_forward and not with_head
