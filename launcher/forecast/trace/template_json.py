"""Templates as JSON."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from launcher.forecast.trace.events import (
    AllocationId,
    Lifetime,
    Module,
    Part,
    Place,
    Trace,
    Tuned,
)
from launcher.forecast.trace.template import CHUNKS, Size, Template, Workspace
from launcher.forecast.trace.work import Product, SegmentWork

PARTS: Final[tuple[Part, ...]] = (
    *("embed", "block", "head"),
    *("head_backward", "block_backward", "embed_backward"),
)


def as_json(template: Template) -> dict[str, Any]:
    """Plain lists: of what comes often, a list for each field, which compresses to half."""
    trace = template.trace
    lifetimes = [
        (*_numbers(each.allocation), each.size_bytes, int(each.saved), each.at, *_end(each))
        for each in trace.lifetimes
    ]
    gradients = [
        (name, *_numbers(allocation), PARTS.index(where.part), where.layer, at)
        for name, allocation, where, at in trace.gradients
    ]
    marks = [
        (mark.name, int(mark.entering), int(mark.forward), PARTS.index(where.part), where.layer, at)
        for mark, where, at in trace.marks
        if isinstance(mark, Module)
    ]
    works = [
        (
            *(PARTS.index(place.part), place.layer, repeat),
            [[*product, times] for product, times in work.products.items()],
            # no fused bytes, no collectives: stored structures are neither compiled nor sharded
            *([*counter.items()] for counter in _counters(work)),
            *(work.operators, work.kernels),
        )
        for (place, repeat), work in trace.works.items()
    ]
    return {
        "layers": trace.layers,
        "sizes": [_size_as_json(size) for size in template.sizes],
        "lives": _columns(lifetimes),
        "gradients": _columns(gradients),
        "marks": _columns(marks),
        "works": works,
    }


def from_json(found: Mapping[str, Any]) -> Template:
    """Read what `as_json` wrote."""

    def place(part: int, layer: int) -> Place:
        return Place(PARTS[part], layer)

    lifetimes = [
        Lifetime(
            (place(part, layer), number),
            size,
            bool(saved),
            at,
            None if end == _OUTLIVES else (place(end, its), then),
        )
        for part, layer, number, size, saved, at, end, its, then in zip(
            *found["lives"], strict=True
        )
    ]
    gradients = [
        (name, (place(part, layer), number), place(where, its), at)
        for name, part, layer, number, where, its, at in zip(*found["gradients"], strict=True)
    ]
    marks: list[tuple[Module | Tuned, Place, int]] = [
        (Module(name, bool(entering), bool(forward)), place(part, layer), at)
        for name, entering, forward, part, layer, at in zip(*found["marks"], strict=True)
    ]
    sizes = tuple(_size_from_json(size) for size in found["sizes"])
    works = {
        (place(part, layer), repeat): SegmentWork(
            Counter({Product(*product): times for *product, times in products}),
            Counter(dict(attention)),
            Counter(dict(elementwise)),
            Counter(dict(copied)),
            operators=operators,
            kernels=kernels,
        )
        for part, layer, repeat, products, attention, elementwise, copied, operators, kernels in (
            found["works"]
        )
    }
    return Template(Trace(found["layers"], lifetimes, gradients, marks, works, CHUNKS), sizes)


def _counters(work: SegmentWork) -> tuple[Counter[int], ...]:
    return work.attention_flops, work.elementwise_bytes, work.copied_bytes


_OUTLIVES: Final = -1
"""In the place of a part: a storage that is there when the micro-batch is over."""


def _numbers(allocation: AllocationId) -> tuple[int, int, int]:
    place, number = allocation
    return PARTS.index(place.part), place.layer, number


def _end(lifetime: Lifetime) -> tuple[int, int, int]:
    return (_OUTLIVES, 0, 0) if lifetime.end is None else _numbers(lifetime.end)


def _columns(rows: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]


def _size_as_json(size: Size | Workspace) -> list[Any]:
    if isinstance(size, Size):
        return [size.factor, *size.names]
    return [size.of, *map(_size_as_json, size.sizes)]


def _size_from_json(found: list[Any]) -> Size | Workspace:
    first, *others = found
    if isinstance(first, int):
        return Size(first, tuple(others))
    return Workspace(first, tuple(Size(factor, tuple(names)) for factor, *names in others))
