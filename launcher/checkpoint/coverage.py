"""Whether pieces of tensors hold every element once, without looking at elements or rows."""

import bisect
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from launcher.strategies.places import Box, Places


class Piece(Protocol):
    """What is to be known of a piece of a tensor."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def numel(self) -> int: ...
    @property
    def pitch(self) -> int | None: ...
    @property
    def places(self) -> Places: ...


def uncovered(pieces: Sequence[Piece], wanted: Mapping[tuple[str, str], int]) -> str | None:
    """What is wrong with pieces that should hold each element of every (name, kind) in `wanted`,
    which says how many it has, exactly once; None for nothing."""
    with_gaps: dict[tuple[str, str], list[Piece]] = {
        (piece.name, piece.kind): [] for piece in pieces if piece.pitch is not None
    }
    ends: dict[tuple[str, str], int] = {}
    for piece in sorted(pieces, key=lambda p: (p.name, p.kind, p.start)):
        key = (piece.name, piece.kind)
        if key in with_gaps:
            with_gaps[key].append(piece)
            continue
        if piece.start != ends.get(key, 0):
            word = "overlapping" if piece.start < ends.get(key, 0) else "missing"
            return f"has {word} elements of {piece.name} ({piece.kind})"
        ends[key] = piece.start + piece.numel
    for (name, kind), found in with_gaps.items():
        if fault := _fault(found, wanted.get((name, kind), 0)):
            return f"has {fault} elements of {name} ({kind})"
    for name, kind in sorted((wanted.keys() | ends.keys()) - with_gaps.keys()):
        if wanted.get((name, kind)) != ends.get((name, kind)):
            return f"does not cover {name} ({kind}) exactly"
    return None


def _fault(pieces: Sequence[Piece], numel: int) -> str | None:
    """Of one tensor of which some pieces have gaps: as boxes of a matrix whose rows are as long as
    their pitch."""
    width, *others = {piece.pitch for piece in pieces if piece.pitch is not None}
    if others:
        return "differently spaced"
    places = [piece.places for piece in pieces]
    if any(piece.stop > numel for piece in places):
        return "too many"
    if _overlap(box for piece in places for box in piece.boxes(width)):
        return "overlapping"
    return "missing" if sum(piece.numel for piece in places) < numel else None


def _overlap(boxes: Iterable[Box]) -> bool:
    """Going down the rows, with the columns of the boxes in the current one in order."""
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
        neighbours = taken[max(0, place - 1) : place + 1]
        if any(left < columns[1] and columns[0] < right for left, right in neighbours):
            return True
        taken.insert(place, columns)
    return False
