"""Leave out of a trace repeats that allocate nothing new: chunks of the loss, tiles of MLPs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor

from launcher.forecast.trace.counting import WorkCounter
from launcher.forecast.trace.patched import patched
from launcher.forecast.trace.template import CHUNKS
from launcher.model import loss as head_loss
from launcher.model import recompute

COMPUTED_TILES: Final = 3
"""Tiles of an MLP in a trace, where there are as many."""


def few_repeats(work: WorkCounter, passed_rows: int | None) -> AbstractContextManager[None]:
    """Compute few chunks of the loss, and few tiles unless `passed_rows` is 0."""
    changes: list[tuple[Any, str, Any]] = [(head_loss, "row_chunks", _few_chunks(work))]
    if passed_rows != 0:
        changes.append((recompute, "by_tiles", _few_tiles(passed_rows)))
    return patched(*changes)


def _few_chunks(work: WorkCounter) -> Callable[[int, int], Iterator[slice]]:
    """Leave out chunks of the loss that ask the allocator for what the one before has freed: long
    sequences have thousands."""
    whole = head_loss.row_chunks

    def few(rows: int, chunk_rows: int) -> Iterator[slice]:
        chunks = list(whole(rows, chunk_rows))
        work.chunks = len(chunks)
        for number, chunk in enumerate(chunks[:-1][: CHUNKS - 1]):
            work.repeat = "chunk" if number else "first_chunk"
            yield chunk
        work.repeat = "last_chunk"
        yield chunks[-1]
        work.repeat = "once"  # what the head does behind its chunks

    return few


class _PassedOver(torch.autograd.Function):
    """Rows in memory, and their gradient, without the operators between."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.empty_like(gradient)


def _few_tiles(passed_rows: int | None) -> Callable[..., list[Tensor]]:
    """Compute the first tile of an MLP and the last two: each of those between leaves its rows,
    and asks the allocator for nothing else that the one before has not freed.

    The rows passed over come before the last two, so that these find in memory what they would.
    """
    whole = recompute.by_tiles

    def few(function: Callable[[Tensor], Tensor], rows: Tensor, tile: int) -> list[Tensor]:
        passed = passed_rows or (-(-rows.size(1) // tile) - COMPUTED_TILES) * tile
        if passed <= 0:
            return whole(function, rows, tile)
        last = rows.size(1) - passed - (COMPUTED_TILES - 1) * tile
        first, between, *others = rows.split([tile, passed, tile, last], dim=1)
        out = [function(first), _PassedOver.apply(between)]
        return [*out, *(function(part) for part in others)]

    return few
