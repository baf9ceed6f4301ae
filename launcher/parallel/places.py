"""Places of a shard's elements in the flattened tensor: contiguous, or in runs with gaps.

A matrix sharded by columns gives each rank runs: of every row the same columns. With the distance
of two runs as the length of a row, every shard is a few boxes of one matrix, and the corners alone
tell which elements two shards have in common.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Self, TypeVar

from torch import Tensor

Number = TypeVar("Number", int, Tensor)


class Box(NamedTuple):
    """Rows [top, bottom) and columns [left, right) of a matrix, as a shard's data holds them: the
    first element is number `at`, and that of each further row `step` later."""

    top: int
    bottom: int
    left: int
    right: int
    at: int
    step: int

    def within(self, other: "Box") -> "Box | None":
        """Return the intersection with another box."""
        top, bottom = max(self.top, other.top), min(self.bottom, other.bottom)
        left, right = max(self.left, other.left), min(self.right, other.right)
        if top >= bottom or left >= right:
            return None
        at = self.at + (top - self.top) * self.step + left - self.left
        return Box(top, bottom, left, right, at, self.step)

    def view(self, data: Tensor) -> Tensor:
        """View of its elements in a shard's data, [rows, columns]."""
        columns = self.right - self.left
        count = (self.bottom - self.top - 1) * self.step + columns
        return data[self.at : self.at + count].unfold(0, columns, self.step)


@dataclass(frozen=True, slots=True)
class Places:
    """Element i of a shard is element start + i // run * pitch + i % run of the flattened tensor.

    Elements that follow each other without gaps are one run, whatever they were called.
    """

    start: int
    numel: int
    run: int
    pitch: int

    @classmethod
    def of(cls, start: int, numel: int, run: int | None, pitch: int | None) -> Self:
        """Places of a shard, where a run and pitch of None stand for one run."""
        if run is None or pitch is None or run == pitch or run >= numel:
            return cls(start, numel, numel, numel)
        return cls(start, numel, run, pitch)

    @property
    def contiguous(self) -> bool:
        """There are no gaps."""
        return self.run == self.numel

    @property
    def stop(self) -> int:
        """One past the last element's place."""
        return self.start + self.numel if self.contiguous else self.place(self.numel - 1) + 1

    def place(self, number: Number) -> Number:
        """Return the place of the element, or elements, of a number."""
        return self.start + number // self.run * self.pitch + number % self.run

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, "Places"]]:
        """Yield (number of the first element, places) of what the elements [begin, end) consist of:
        runs of one length, and at either end an incomplete run."""
        run = self.run
        first, last = min(-(-begin // run) * run, end), max(begin, end // run * run)
        for low, high in pairwise(sorted({begin, first, last, end})):
            yield low, Places.of(self.place(low), high - low, run, self.pitch)

    def boxes(self, width: int, begin: int = 0, end: int | None = None) -> Iterator[Box]:
        """Boxes of the elements [begin, end), from which `at` counts, in a matrix with rows of
        `width`, which is the pitch of a shard with gaps."""
        end = self.numel if end is None else end
        if self.contiguous:
            begin, end = self.start + begin, self.start + end
            for top, bottom, left, right in _rows(begin, end, width):
                yield Box(top, bottom, left, right, top * width + left - begin, width)
            return
        assert width == self.pitch
        for top, bottom, left, right in _rows(begin, end, self.run):
            at, rows, columns = top * self.run + left - begin, bottom - top, right - left
            row, column = divmod(self.start + top * width + left, width)
            inside = min(columns, width - column)
            yield Box(row, row + rows, column, column + inside, at, self.run)
            if inside < columns:  # the runs reach into the next row
                row += 1
                yield Box(row, row + rows, 0, columns - inside, at + inside, self.run)


def _rows(begin: int, end: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the elements [begin, end) of a flattened matrix: a part of a row, whole rows, a part of
    a row, as (top, bottom, left, right) each."""
    (top, left), (bottom, right) = divmod(begin, width), divmod(end, width)
    if top == bottom:
        yield top, top + 1, left, right
        return
    if left > 0:
        yield top, top + 1, left, width
        top += 1
    if top < bottom:
        yield top, bottom, 0, width
    if right > 0:
        yield bottom, bottom + 1, 0, right
