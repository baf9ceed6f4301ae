"""Count what each dispatched operator of a recording costs, whatever a block consists of.

Products and attention are counted by their shapes, everything else that is no view by the bytes
that it reads and writes.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.forecast.trace.events import Place, Works
from launcher.forecast.trace.operators import (
    COLLECTIVES,
    kind_of,
    moved_bytes,
    name_of,
    tensors_in,
)
from launcher.forecast.trace.work import Product, Repeat, SegmentWork, Work

T = TypeVar("T")


class WorkCounter:
    """Adds up the work of operators, segment by segment."""

    def __init__(self) -> None:
        self.works: Works = defaultdict(SegmentWork)
        self.place = Place("embed")
        self.repeat: Repeat = "once"
        self.visible_keys: int | None = None
        """Keys that a causal kernel scores for most queries, where a window leaves it fewer."""
        self.chunks = 1
        """Chunks of the loss, of which at most three run."""
        self.paused = False

    @property
    def here(self) -> SegmentWork:
        """Return the work of the segment that runs."""
        return self.works[self.place, self.repeat]

    def launched(self) -> SegmentWork:
        """Count a kernel, and the operator that starts it; returns the segment's work."""
        self.here.operators += 1
        self.here.kernels += 1
        return self.here

    def operator(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operator has run."""
        if self.paused:
            return
        here, kind = self.here, kind_of(func)
        if kind == "collective":
            # The whole tensor is the larger one: the result of a gather, the operand of a
            # reduce-scatter.
            here.sent[COLLECTIVES[name_of(func)], max(args[0].nbytes, out.nbytes)] += 1
            return
        here.operators += 1
        if kind == "view":
            return
        here.kernels += 1
        if kind == "product":
            total, left, right = _operands(args)
            self.product(left, right, out, total=total)
        elif kind == "fp8 product":
            self.product(args[0], args[1], out, fp8=True)
        elif kind == "grouped product":
            self._grouped_products(name_of(func), args, out)
        elif kind == "convolution":
            self._convolution(name_of(func), args, out)
        elif kind == "attention":
            here.attention_flops.update(self._attention_flops(func, args))
        else:
            moved = here.copied_bytes if kind == "copy" else here.elementwise_bytes
            moved.update(moved_bytes(func, args, out))

    def fused(self, moved: Iterable[int]) -> None:
        """A kernel of compiled code has run, which has read and written so many bytes."""
        if not self.paused:
            self.launched().fused_bytes.update(moved)

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
        if total is not None and total.dim() > 1:  # a bias is small beside the product
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
        # positions in the schemas of aten::convolution and convolution_backward
        transposed, groups = (args[7], args[9]) if backward else (args[6], args[8])
        places = (args[1] if backward else args[0]) if transposed else result
        rows = places.numel() // places.size(1)
        columns, inner = weight.size(0) // groups, weight[0].numel()
        times = sum(args[10][:2]) if backward else 1  # output_mask: input, weight, bias
        for _ in range(times):
            product = Product(groups, rows, columns, inner, result.element_size())
            self.here.products[product] += 1

    def _attention_flops(self, func: Any, args: Any) -> dict[int, int]:
        """FLOPs -> how often. Q K^T and A V, two FLOPs for each pair; a fused backward has five
        products for these two, since it computes the scores once more (FlashAttention-2,
        arXiv:2307.08691, 3.1.2)."""
        places, backward = _attention_arguments(func)
        query, keys = args[places["query"]], args[places["key"]].size(2)
        at = places["is_causal"]
        causal = at < len(args) and args[at]
        batch, heads, queries, width = query.shape
        of_pair = 2 * (5 if backward else 2) * batch * heads * width
        window = self.visible_keys
        if causal and window is not None and window < keys - 1:
            # The first queries see fewer keys. Two numbers, each a product of dimensions.
            return {of_pair * queries * window: 1, of_pair // 2 * window * window: -1}
        # kernels skip the tiles above the diagonal
        return {of_pair * queries * keys // (2 if causal else 1): 1}


_active: list[WorkCounter] = []


@contextlib.contextmanager
def counting(counter: WorkCounter) -> Iterator[None]:
    """Have `as_kernel` and `as_product` tell this counter."""
    _active.append(counter)
    try:
        yield
    finally:
        _active.pop()


def _counts() -> bool:
    """Return whether somebody counts here: not what a compiler looks at, whose graph is counted."""
    return bool(_active) and not _active[-1].paused and not torch.compiler.is_compiling()


def as_kernel(compute: Callable[[], T], *read: Tensor) -> T:
    """Return what `compute` does, counted as one kernel that reads `read` and writes the result."""
    if not _counts():
        return compute()
    # The operators that stand for the kernel here must not be counted as well.
    with paused():
        out = compute()
    moved = (tensor.nbytes for tensor in (*read, *tensors_in((out,))))
    _active[-1].launched().elementwise_bytes.update(moved)
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
    if _counts():
        _active[-1].launched()
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


@cache
def _attention_arguments(func: Any) -> tuple[dict[str, int], bool]:
    names = [argument.name for argument in func._schema.arguments]
    return {name: number for number, name in enumerate(names)}, names[0].startswith("grad")


def _operands(args: Any) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return what a product is added to, if anything, and its operands."""
    *total, left, right = [arg for arg in args if isinstance(arg, Tensor)]
    return total[0] if total else None, left, right
