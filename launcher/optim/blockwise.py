"""Optimizer states in 8 bits, block by block.

The dynamic tree map and the blocks of Dettmers et al., "8-bit Optimizers via Block-wise
Quantization" (2022, arXiv:2110.02861); the same codes as in bitsandbytes and torchao.
"""

import functools

import torch
from torch import Tensor

BLOCK_ELEMENTS = 256
"""Elements that share one fp32 scale, the one of the largest magnitude."""


def quantize(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """fp32 [n] -> (uint8 codes [n], fp32 scales [ceil(n / 256)]); the last block may be short.

    The scale has its sign: the map holds 1 but not -1, and what stands for the scale exactly gives
    the same codes and scales when it is quantized again, from a checkpoint.
    Unsigned values, second moments, are rounded to 0 only where they are 0: a gradient far below
    its block's largest would otherwise be divided by nothing but epsilon.
    """
    blocks = _blocks(values)
    scales = blocks.gather(1, blocks.abs().argmax(1, keepdim=True)).squeeze(1)
    scales = torch.where(scales.abs() < 1e-12, 1e-12, scales)
    codes = torch.bucketize(blocks / scales[:, None], midpoints(signed, values.device))
    if not signed:
        codes.clamp_min_((blocks > 0).to(codes.dtype))
    return codes.to(torch.uint8).view(-1)[: values.numel()], scales


def dequantize(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The inverse: uint8 [n], fp32 [ceil(n / 256)] -> fp32 [n]."""
    values = levels(signed, codes.device)[_blocks(codes).int()]
    return values.mul_(scales[:, None]).view(-1)[: codes.numel()]


def scale_count(elements: int) -> int:
    """Scales that `elements` codes need."""
    return -(-elements // BLOCK_ELEMENTS)


def _blocks(flat: Tensor) -> Tensor:
    missing = -flat.numel() % BLOCK_ELEMENTS
    padded = torch.nn.functional.pad(flat, (0, missing)) if missing else flat
    return padded.view(-1, BLOCK_ELEMENTS)


@functools.cache
def levels(signed: bool, device: torch.device) -> Tensor:
    """The 256 values that a code can stand for, ascending, in [-1, 1] or [0, 1].

    The more leading zeros the exponent has, the fewer bits are left for the fraction: seven
    decades, of which the largest has 64 (signed) or 128 levels.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1.0, 2**exponent * (1 if signed else 2) + 1, dtype=torch.double)
        fractions = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - 6)).tolist()
        values += fractions
        if signed:
            values += [-fraction for fraction in fractions]
    assert len(values) == 256
    return torch.tensor(sorted(values), device=device)


@functools.cache
def midpoints(signed: bool, device: torch.device) -> Tensor:
    """The 255 between two levels each; one that lies there is rounded down."""
    found = levels(signed, device)
    return (found[:-1] + found[1:]) / 2
