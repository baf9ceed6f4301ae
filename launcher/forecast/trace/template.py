"""Traces with products of dimensions in the place of sizes, so that one recording serves for many.

Every tensor that a decoder allocates is as large as a product of its dimensions. A trace that was
recorded with dimensions that are distinct primes says by the factors of each size which of them it
is a product of; with other dimensions in their place it is the trace of another model, or of
another micro-batch, of the same structure.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from launcher.forecast.trace.events import (
    Module,
    Place,
    Trace,
    Tuned,
    Works,
    WorkspaceBytes,
    WorkspaceOf,
)
from launcher.forecast.trace.work import NO_WORK, Work
from launcher.model.config import ModelConfig
from launcher.model.foreign.config import ForeignConfig
from launcher.model.loss import automatic_chunk_rows
from launcher.parallel.mesh import TensorRank

CHUNKS: Final = 3
"""Chunks of the loss in a trace: the first, the last and one for all those between, each of
which asks the allocator for what the one before has just freed."""
_HEAD: Final = Place("head")
_FIRST_CODE: Final = 2**62
"""First of the numbers that stand for workspaces while a template is recorded: no tensor is as
large."""

Dimensions = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes as a product: a factor, and dimensions, which repeat where they are squared."""

    factor: int
    names: tuple[str, ...]

    def bytes(self, dimensions: Dimensions) -> int:
        """Return the bytes of such a model."""
        return self.factor * math.prod(dimensions[name] for name in self.names)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes that a GPU takes while a kernel runs: see `workspace_bytes`."""

    of: WorkspaceOf
    sizes: tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class Template:
    """A trace with products in the place of its sizes."""

    trace: Trace
    """A trace with indices into `sizes` in the place of bytes."""
    sizes: tuple[Size | Workspace, ...]


def product_of(number: int, dimensions: Dimensions) -> Size:
    """Return what a number is a product of, where each dimension has a prime factor of its own."""
    names = []
    for name, value in dimensions.items():
        while number and number % value == 0:
            number //= value
            names.append(name)
    return Size(number, tuple(names))


def template_of(
    record: Callable[[WorkspaceBytes], Trace], product: Callable[[int], Size]
) -> Template:
    """Make a template of what `record` records with the bytes of workspaces.

    Args:
        product: what a size is a product of.
    """
    coded: list[Workspace] = []

    def code(of: WorkspaceOf, numbers: Sequence[int]) -> int:
        coded.append(Workspace(of, tuple(map(product, numbers))))
        return _FIRST_CODE + len(coded) - 1

    trace = record(code)
    sizes: dict[Size | Workspace, int] = {}

    def number(size_bytes: int) -> int:
        is_code = size_bytes >= _FIRST_CODE
        size = coded[size_bytes - _FIRST_CODE] if is_code else product(size_bytes)
        return sizes.setdefault(size, len(sizes))

    lifetimes = [each._replace(size_bytes=number(each.size_bytes)) for each in trace.lifetimes]

    def of_work(size: int) -> int:  # FLOPs may be more than the codes, which are bytes
        return sizes.setdefault(product(size), len(sizes))

    works = {where: work.mapped(of_work) for where, work in trace.works.items()}
    marks = _with_copied_bytes(trace, number)
    unlike = frozenset((number(one), number(other)) for one, other in trace.unlike)
    recorded = replace(trace, lifetimes=lifetimes, marks=marks, works=works, unlike=unlike)
    return Template(recorded, tuple(sizes))


def filled_work(template: Template, dimensions: Dimensions) -> dict[Place, Work]:
    """Work of each segment of these dimensions, among them `chunks` of the loss."""
    # workspaces are memory, and no work
    found = [s.bytes(dimensions) if isinstance(s, Size) else 0 for s in template.sizes]
    return segment_work(template.trace.works, dimensions["chunks"], found.__getitem__)


def segment_work(
    works: Works, chunks: int, number: Callable[[int], int] = lambda size: size
) -> dict[Place, Work]:
    """Work of each segment with so many chunks of the loss.

    Args:
        number: what to put in the place of each size.
    """
    # A loss of one chunk runs its last one alone. `last_chunk` comes once in any case.
    repeats = {"once": 1, "first_chunk": min(1, chunks - 1), "chunk": max(0, chunks - 2)}
    found: dict[Place, Work] = {}
    for (place, repeat), work in works.items():
        times = repeats.get(repeat, 1)
        found[place] = found.get(place, NO_WORK).plus(work.total(number), times=times)
    return found


def filled(template: Template, dimensions: Dimensions, workspace_bytes: WorkspaceBytes) -> Trace:
    """The trace of these dimensions, among them `chunks` of the loss."""
    found = [
        size.bytes(dimensions)
        if isinstance(size, Size)
        else workspace_bytes(size.of, [each.bytes(dimensions) for each in size.sizes])
        for size in template.sizes
    ]
    trace, left_out = template.trace, _chunks_left_out(template, dimensions["chunks"])
    lifetimes = [
        lifetime._replace(size_bytes=found[lifetime.size_bytes])
        for number, lifetime in enumerate(trace.lifetimes)
        if number not in left_out
    ]
    # What reads the work of a template asks `filled_work`.
    marks = _with_copied_bytes(trace, found.__getitem__)
    return Trace(trace.layers, lifetimes, trace.gradients, marks, {}, dimensions["chunks"])


def _with_copied_bytes(
    trace: Trace, number: Callable[[int], int]
) -> list[tuple[Module | Tuned, Place, int]]:
    """Return the marks of a trace with `number` of what each compiled kernel writes over."""
    return [
        (Tuned(number(mark.copied_bytes)) if isinstance(mark, Tuned) else mark, place, at)
        for mark, place, at in trace.marks
    ]


def local_rows(model: ModelConfig, rows: int, tensor_parallel: int) -> int:
    """Return the rows that a rank has between matrices; of a decoder of transformers, all."""
    return rows if isinstance(model, ForeignConfig) else rows // tensor_parallel


def loss_chunks(
    model: ModelConfig, rows: int, rank: TensorRank | None, *, fused: bool = True
) -> tuple[int, int, int]:
    """(rows of each chunk of the loss but the last, rows of the last one, how many), of those that
    one rank has. Whole matrices have a `fused` loss on a GPU."""
    ranks = 1 if rank is None else rank.size
    chunk = model.loss_chunk
    if chunk is None:
        vocab_size = -(-model.vocab_size // ranks)  # the largest shard
        how = {"fused": fused and rank is None, "on_host": not fused and rank is None}
        chunk = automatic_chunk_rows(rows, vocab_size, model.d_model, **how)
    own_rows = local_rows(model, rows, ranks)
    # A chunk is in rows of all ranks; without chunks (0) it is all of them.
    own_chunk = -(-(chunk or rows) * own_rows // rows)
    count = -(-own_rows // own_chunk)
    return own_chunk, own_rows - (count - 1) * own_chunk, count


def _chunks_left_out(template: Template, chunks: int) -> set[int]:
    """Return the numbers of the lifetimes of surplus chunks of the loss: those in the head between
    the starts of two chunks."""
    first, last = (_of_head(template, name) for name in ("chunk", "last_chunk"))
    if chunks >= CHUNKS or not first:
        return set()
    # Each of the first two chunks allocates equally often: the second begins in the middle.
    until = first[len(first) // 2] if chunks == 2 else last[0]
    return {
        number
        for number, lifetime in enumerate(template.trace.lifetimes)
        if lifetime.allocation[0] == _HEAD and first[0] <= lifetime.at < until
    }


def _of_head(template: Template, name: str) -> list[int]:
    """Return when a size that grows with a dimension is allocated there."""
    return sorted(
        lifetime.at
        for lifetime in template.trace.lifetimes
        if isinstance(size := template.sizes[lifetime.size_bytes], Size)
        and name in size.names
        and lifetime.allocation[0] == _HEAD
    )
