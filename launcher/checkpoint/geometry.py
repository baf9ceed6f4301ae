"""Ranges of tensors, and their geometry: whether they cover every element once, what two of them
share. Computed from corners of boxes, without looking at elements or rows."""

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from annotated_types import Interval, Len, Predicate
from torch import Tensor

from launcher.checkpoint.document import Count
from launcher.parallel.places import Box, Places

Name = Annotated[str, Len(1, 255), Predicate(str.isprintable)]  # fits into a sentence
Positive = Annotated[int, Interval(ge=1, le=2**53)]
Checksum = Annotated[int, Interval(ge=0, lt=2**32)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """`numel` elements of a flattened tensor from `start` on, at `offset_bytes` of a file; with
    gaps between runs where there are `run` and `pitch`, which mean what they mean to a `Shard`.

    There is one CRC-32 for each `CHUNK_ELEMENTS` elements, so a part can be read and checked
    without the rest.
    """

    name: Name
    kind: Name
    start: Count
    numel: Positive
    offset_bytes: Count
    checksums: Sequence[Checksum]
    run: Positive | None = None
    pitch: Positive | None = None

    def __post_init__(self) -> None:
        if self.run is None or self.pitch is None:
            if self.run != self.pitch:
                raise ValueError("run and pitch go together")
        elif self.pitch < self.run or self.numel % self.run > 0:
            raise ValueError("pitch must be at least run, and numel a multiple of run")

    @property
    def places(self) -> Places:
        """Places of the elements in the whole tensor."""
        return Places.of(self.start, self.numel, self.run, self.pitch)


def uncovered(pieces: Sequence[Range], wanted: Mapping[tuple[str, str], int]) -> str | None:
    """Return what is wrong with pieces that should cover each tensor exactly once, or None.

    Args:
        wanted: (name, kind) -> number of elements.
    """
    found: dict[tuple[str, str], list[Places]] = {key: [] for key in wanted}
    for piece in pieces:
        found.setdefault((piece.name, piece.kind), []).append(piece.places)
    for (name, kind), places in sorted(found.items()):
        if fault := _fault(places, wanted.get((name, kind), 0)):
            return f"has {fault} elements of {name} ({kind})"
    return None


def _fault(places: Sequence[Places], numel: int) -> str | None:
    """Check one tensor, as boxes of a matrix with the pitch of its pieces as its width."""
    width, *others = {piece.pitch for piece in places if not piece.contiguous} or {numel}
    if others:
        return "differently spaced"
    if any(piece.stop > numel for piece in places):
        return "too many"
    if _overlap(box for piece in places for box in piece.boxes(width)):
        return "overlapping"
    # Inside the tensor and without overlaps, only too few elements can be wrong.
    return "missing" if sum(piece.numel for piece in places) < numel else None


def _overlap(boxes: Iterable[Box]) -> bool:
    # A sweep down the rows, with the columns of the boxes in the current row in order.
    edges = []
    for box in boxes:
        edges.append((box.top, True, (box.left, box.right)))
        edges.append((box.bottom, False, (box.left, box.right)))
    edges.sort()  # in the same row, what ends comes first
    taken: list[tuple[int, int]] = []
    for _, begins, columns in edges:
        place = bisect.bisect_left(taken, columns)
        if not begins:
            del taken[place]
            continue
        # Sorted and disjoint: only the ranges next to its place can overlap.
        neighbours = taken[max(0, place - 1) : place + 1]
        if any(left < columns[1] and columns[0] < right for left, right in neighbours):
            return True
        taken.insert(place, columns)
    return False


def mover(
    source: Places, begin: int, end: int, target: Places
) -> Callable[[Tensor, Tensor], None] | None:
    """Return a function that copies the source's elements [begin, end) to their places in a target.

    It takes the chunk and all of the target's data; None where they share no element.
    """
    pitches = {piece.pitch for piece in (source, target) if not piece.contiguous}
    if len(pitches) > 1:
        apart = source.place(end - 1) < target.start or target.stop <= source.place(begin)
        return None if apart else partial(_pick, source, begin, target)
    width = pitches.pop() if pitches else max(source.stop, target.stop)
    pairs = [
        (there, here)
        for theirs in source.boxes(width, begin, end)
        for ours in target.boxes(width)
        if (there := theirs.within(ours)) and (here := ours.within(theirs))
    ]
    return partial(_copy, pairs) if pairs else None


def _copy(pairs: Sequence[tuple[Box, Box]], chunk: Tensor, data: Tensor) -> None:
    for there, here in pairs:
        here.view(data).copy_(there.view(chunk))


def _pick(source: Places, begin: int, target: Places, chunk: Tensor, data: Tensor) -> None:
    """Copy element by element, between pieces of different pitch."""
    place = source.place(torch.arange(begin, begin + len(chunk))) - target.start
    row, column = place // target.pitch, place % target.pitch
    wanted = (place >= 0) & (row < target.numel // target.run) & (column < target.run)
    at = (row * target.run + column)[wanted]
    data[at.to(data.device)] = chunk[wanted].to(data)
