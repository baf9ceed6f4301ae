"""Booleans as bits: element i is bit i % 8, from the lowest, of byte i // 8."""

from typing import Final

import torch
from torch import Tensor

CHUNK_ELEMENTS: Final = 2**20
"""Bits that are unpacked at a time; a multiple of 8."""
UNPACKED_BYTES: Final = 2
"""Of memory for each of them: its bit alone, and whether that is 0."""


def bytes_of(start: int, numel: int) -> int:
    """Of the bits [start, start + numel), which begin and end anywhere in a byte."""
    return -(-(start + numel) // 8) - start // 8 if numel else 0


def pack(mask: Tensor) -> Tensor:
    """mask, bool of any shape -> uint8 [ceil(elements / 8)]; what is left of the last byte is 0."""
    flat = mask.flatten()
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % 8)).view(-1, 8)
    return (padded * _powers(mask.device)).sum(dim=1, dtype=torch.uint8)


def unpack(bits: Tensor, numel: int, *, skip: int = 0) -> Tensor:
    """bits, uint8 -> bool [numel], without the first `skip` of them."""
    return ~_is_zero(bits, numel, skip)


def zero(values: Tensor, bits: Tensor, *, skip: int) -> None:
    """Set to 0 the values, flat, whose bit is 0; bit number `skip` of all is the first one's.

    A piece at a time: nothing of the size of the values is allocated.
    """
    for begin in range(0, len(values), CHUNK_ELEMENTS):
        part = values[begin : begin + CHUNK_ELEMENTS]
        own = bits[(skip + begin) // 8 : -(-(skip + begin + len(part)) // 8)]
        part.masked_fill_(_is_zero(own, len(part), skip), 0)


def _is_zero(bits: Tensor, numel: int, skip: int) -> Tensor:
    alone = bits.unsqueeze(1) & _powers(bits.device)
    return (alone == 0).view(-1)[skip : skip + numel]


def _powers(device: torch.device) -> Tensor:
    """[1, 2, 4, ..., 128], made on the device, so that no step waits for a copy."""
    return 1 << torch.arange(8, dtype=torch.uint8, device=device)
