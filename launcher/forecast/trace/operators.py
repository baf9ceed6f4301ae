"""Kinds of torch's operators, and the bytes that they move, by the name in their schema."""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Final

from torch import Tensor

# Others read their operands and write a result.
EMPTY: Final = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_VIEWS: Final = frozenset(
    {"_unsafe_view", "_reshape_alias", "detach", "lift_fresh", "alias", "wait_tensor"}
)
_COPIES: Final = (
    *("_to_copy", "copy_", "clone", "cat", "stack", "constant_pad_nd", "repeat"),
    *("fill_", "zero_", "zeros", "zeros_like", "ones_like", "new_zeros", "full", "new_full"),
)
_KINDS: Final = {
    **dict.fromkeys(("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_"), "product"),
    "_scaled_mm": "fp8 product",
    # of experts: torch's own, and what transformers has where that cannot run
    "_grouped_mm": "grouped product",
    "grouped_mm_fallback": "grouped product",
    "grouped_mm_fallback_backward": "grouped product",
    **dict.fromkeys(("convolution", "convolution_backward"), "convolution"),
    **dict.fromkeys(_COPIES, "copy"),
}
COLLECTIVES: Final = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
}
"""Operator in a compiler's graph -> collective that a plan prices."""
_OVER_MANY: Final = ("_foreach_", "_fused_")
_WRITE_ALL: Final = frozenset({"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_copy"})
"""Do not read what they write to."""
_LOOK_UP: Final = frozenset({"embedding", "index", "index_select", "gather"})
"""Read as much of a table as they return."""
_SCATTER: Final = frozenset({"scatter_", "scatter_add_"})
"""Change as many elements as they have indices."""
_FUSED_LOSS: Final = "softmax_gradient_"
"""Reads the logits twice, for the sum and for the gradient (launcher/model/softmax_kernel.py)."""


@cache
def kind_of(func: Any) -> str:
    """Return what an operator does, as far as its cost goes; "elementwise" where it moves bytes."""
    name = name_of(func)
    if func.namespace == "_c10d_functional" and name in COLLECTIVES:
        return "collective"
    if func.is_view or name in EMPTY or name in _VIEWS or func.namespace == "prim":
        return "view"
    if "attention" in name:
        return "attention"
    # Of an optimizer, over many tensors at once: as fast as a copy.
    return _KINDS.get(name, "copy" if name.startswith(_OVER_MANY) else "elementwise")


@cache
def name_of(func: Any) -> str:
    """Return its name without namespace and overload."""
    name: str = func._schema.name.partition("::")[2]
    return name


def moved_bytes(func: Any, args: Any, out: Any) -> list[int]:
    """List the bytes that are read and written, one by one: each is a product of dimensions."""
    name = name_of(func)
    written = [tensor.nbytes for tensor in tensors_in((out,))]
    if name == _FUSED_LOSS:
        return [*3 * [args[0].nbytes], *written]  # two reads and a write, in place
    if name in _SCATTER:
        return 2 * [args[2].numel() * args[0].element_size()]
    if name in _LOOK_UP:
        return 2 * written
    read = args[1:] if name in _WRITE_ALL else args
    if not func._schema.returns:  # what it changes is written, too
        changed = (is_written(argument) for argument in func._schema.arguments)
        written = [
            t.nbytes
            for arg, is_ in zip(args, changed, strict=False)
            if is_
            for t in tensors_in((arg,))
        ]
    return [*written, *(tensor.nbytes for tensor in tensors_in(read))]


def is_written(argument: Any) -> bool:
    """Return True for an argument of a schema that its operator changes."""
    return argument.alias_info is not None and argument.alias_info.is_write


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield all tensors, those in lists too."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
