"""What two pieces of a tensor share, and how it gets from one to the other."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from launcher.strategies.places import Box, Places


def mover(
    source: Places, begin: int, end: int, target: Places
) -> Callable[[Tensor, Tensor], None] | None:
    """What copies a chunk, the source's elements [begin, end), to where the target has them: it
    takes the chunk and all of the target's data. None where they share nothing.
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
    """Element by element, where the runs of the two are differently far apart."""
    place = source.place(torch.arange(begin, begin + len(chunk))) - target.start
    row, column = place // target.pitch, place % target.pitch
    wanted = (place >= 0) & (row < target.numel // target.run) & (column < target.run)
    at = (row * target.run + column)[wanted]
    data[at.to(data.device)] = chunk[wanted].to(data)
