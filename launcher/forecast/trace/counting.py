"""Count what each dispatched operator of a recording costs, whatever a block consists of.

Products and attention are counted by their shapes, everything else that is no view by the bytes
that it reads and writes.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, Final, TypeVar

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.forecast.trace.events import Place, Works
from launcher.forecast.trace.work import Product, Repeat, SegmentWork, Work

T = TypeVar("T")


class WorkCounter:
    """Adds up the work of operators, segment by segment."""

    def __init__(self) -> None:
        self.works: Works = defaultdict(SegmentWork)
        self.place = Place("embed")
        self.repeat: Repeat = "once"
        self.visible_keys: int | None = None
        """Keys that a causal kernel scores for each query, where a window leaves it fewer."""
        self.chunks = 1
        """Of the loss, of which at most three run."""
        self.paused = False

    @property
    def here(self) -> SegmentWork:
        """Return the work of the segment that runs."""
        return self.works[self.place, self.repeat]

    def operator(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operator has run."""
        if self.paused:
            return
        here, kind = self.works[self.place, self.repeat], _kind(func)
        here.operators += 1
        if kind == "view":
            return
        here.kernels += 1
        if kind == "product":
            total, left, right = _operands(args)
            self.product(left, right, out, total=total)
        elif kind == "grouped product":
            self._grouped_products(_name(func), args, out)
        elif kind == "convolution":
            self._convolution(_name(func), args, out)
        elif kind == "attention":
            here.attention_flops[self._attention_flops(func, args)] += 1
        else:
            moved = here.copied_bytes if kind == "copy" else here.elementwise_bytes
            moved.update(_moved_bytes(func, args, out))

    def product(
        self,
        left: Tensor,
        right: Tensor,
        out: Tensor,
        *,
        total: Tensor | None = None,
        fp8: bool = False,
    ) -> None:
        """A product has run, [..., rows, inner] x [..., inner, columns]; a matrix `total` that it
        is added to is read besides."""
        *batch, rows, inner = left.shape
        sizes = (batch[0] if batch else 1, rows, right.size(-1), inner)
        self.here.products[Product(*sizes, out.element_size(), fp8)] += 1
        if total is not None and total.dim() > 1:
            self.here.copied_bytes[total.nbytes] += 1

    def _grouped_products(self, name: str, args: Any, out: Any) -> None:
        """Rows that are sent to one of several matrices each: as many FLOPs as with one matrix."""
        left, right = args[:2]
        if not name.endswith("backward"):
            self.product(left, right, out)
            return
        of_left, of_right = out
        self.product(args[-1], right.mT, of_left)
        self.product(left.mT, args[-1], of_right)

    def _convolution(self, name: str, args: Any, out: Any) -> None:
        """As a product of each place of the result with the patch that it sees; backward once more
        for each gradient that is asked for."""
        backward = name.endswith("backward")
        result, weight = (args[0], args[2]) if backward else (out, args[1])
        transposed, groups = (args[7], args[9]) if backward else (args[6], args[8])
        places = (args[1] if backward else args[0]) if transposed else result
        rows = places.numel() // places.size(1)
        columns, inner = weight.size(0) // groups, weight[0].numel()
        times = sum(args[10][:2]) if backward else 1
        for _ in range(times):
            product = Product(groups, rows, columns, inner, result.element_size())
            self.here.products[product] += 1

    def _attention_flops(self, func: Any, args: Any) -> int:
        """Q K^T and A V, two FLOPs for each pair; a fused backward has five products for these
        two, since it computes the scores once more (FlashAttention-2, arXiv:2307.08691, 3.1.2)."""
        places, backward = _attention_arguments(func)
        query, key = args[places["query"]], args[places["key"]]
        at = places["is_causal"]
        causal = at < len(args) and args[at]
        batch, heads, queries, width = query.shape
        pairs = 2 * batch * heads * queries * key.size(2) * width
        if causal and self.visible_keys is not None and self.visible_keys < key.size(2):
            pairs = 2 * batch * heads * queries * self.visible_keys * width
        elif causal:
            pairs //= 2
        return int(5 * pairs if backward else 2 * pairs)


_active: list[WorkCounter] = []


@contextlib.contextmanager
def counting(counter: WorkCounter) -> Iterator[None]:
    """Have `as_kernel` and `as_product` tell this counter."""
    _active.append(counter)
    try:
        yield
    finally:
        _active.pop()


def as_kernel(
    compute: Callable[[], T], *read: Tensor, moved_bytes: int | None = None, copies: bool = False
) -> T:
    """Return what `compute` does, counted as one kernel that reads `read` and writes the result.

    Args:
        moved_bytes: what it reads and writes, where that is not so.
        copies: it changes no values but their type.
    """
    if not _active or _active[-1].paused:
        return compute()
    with paused():
        out = compute()
    here = _active[-1].here
    here.operators += 1
    here.kernels += 1
    moved = here.copied_bytes if copies else here.elementwise_bytes
    if moved_bytes is None:
        moved.update(tensor.nbytes for tensor in (*read, *_tensors((out,))))
    else:
        moved[moved_bytes] += 1
    return out


def note_product(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    *,
    total: Tensor | None = None,
    fp8: bool = False,
) -> None:
    """Count a product left x right that no operator of the recording computes."""
    if _active and not _active[-1].paused:
        here = _active[-1].here
        here.operators += 1
        here.kernels += 1
        _active[-1].product(left, right, out, total=total, fp8=fp8)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Count nothing of what runs inside."""
    counter = _active[-1] if _active else WorkCounter()
    before, counter.paused = counter.paused, True
    try:
        yield
    finally:
        counter.paused = before


class _Counting(TorchDispatchMode):
    def __init__(self, counter: WorkCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._counter.operator(func, args, kwargs, out)
        return out


def work_of_call(call: Callable[[], Any]) -> Work:
    """Work of the operators that `call` dispatches, here and now."""
    counter = WorkCounter()
    with _Counting(counter):
        call()
    return counter.here.total(lambda size: size)


# What operators are, by the name in their schema. Others read their operands and write a result.
_VIEWS: Final = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
)
_VIEWS_TOO: Final = frozenset({"_unsafe_view", "_reshape_alias", "detach", "lift_fresh", "alias"})
_PRODUCTS: Final = frozenset({"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_"})
_GROUPED: Final = frozenset({"_grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback_backward"})
"""Products of experts: torch's own, and what transformers has where that cannot run."""
_COPIES: Final = frozenset(
    {
        *("_to_copy", "copy_", "clone", "cat", "stack", "constant_pad_nd", "repeat"),
        *("fill_", "zero_", "zeros", "zeros_like", "ones_like", "new_zeros", "full", "new_full"),
    }
)
_CONVOLUTIONS: Final = frozenset({"convolution", "convolution_backward"})
_OVER_MANY: Final = ("_foreach_", "_fused_")
_WRITE_ALL: Final = frozenset({"copy_", "fill_", "zero_"})
"""Do not read what they write to."""
_LOOK_UP: Final = frozenset({"embedding", "index", "index_select", "gather"})
"""Read as much of a table as they return."""
_SCATTER: Final = frozenset({"scatter_", "scatter_add_"})
"""Change as many elements as they have indices."""
_FUSED_LOSS: Final = "softmax_gradient_"
"""Reads the logits twice, for the sum and for the gradient (launcher/model/softmax_kernel.py)."""


@cache
def _kind(func: Any) -> str:
    name = _name(func)
    if func.is_view or name in _VIEWS or name in _VIEWS_TOO or func.namespace == "prim":
        return "view"
    if name in _PRODUCTS:
        return "product"
    if name in _GROUPED:
        return "grouped product"
    if "attention" in name:
        return "attention"
    if name in _CONVOLUTIONS:
        return "convolution"
    # Of an optimizer, over many tensors at once: as fast as a copy.
    return "copy" if name in _COPIES or name.startswith(_OVER_MANY) else "elementwise"


@cache
def _name(func: Any) -> str:
    name: str = func._schema.name.partition("::")[2]
    return name


@cache
def _attention_arguments(func: Any) -> tuple[dict[str, int], bool]:
    names = [argument.name for argument in func._schema.arguments]
    return {name: number for number, name in enumerate(names)}, names[0].startswith("grad")


def _operands(args: Any) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return what a product is added to, if anything, and its operands."""
    *total, left, right = [arg for arg in args if isinstance(arg, Tensor)]
    return total[0] if total else None, left, right


def _moved_bytes(func: Any, args: Any, out: Any) -> list[int]:
    """Bytes that are read and written, one by one: each is a product of dimensions."""
    name = _name(func)
    written = [tensor.nbytes for tensor in _tensors((out,))]
    if name == _FUSED_LOSS:
        return [*3 * [args[0].nbytes], *written]
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
            for t in _tensors((arg,))
        ]
    return [*written, *(tensor.nbytes for tensor in _tensors(read))]


def is_written(argument: Any) -> bool:
    """Return True for an argument of a schema that its operator changes."""
    return argument.alias_info is not None and argument.alias_info.is_write


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
