"""Optimizer states in 8 bits, block by block.

The dynamic tree map and the blocks of Dettmers et al., "8-bit Optimizers via Block-wise
Quantization" (2022, arXiv:2110.02861); the same codes as in bitsandbytes and torchao.
"""

import functools

import torch
from torch import Tensor

BLOCK_ELEMENTS = 256
"""Elements that share one fp32 scale: the element of the largest magnitude."""


def quantize(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Quantize fp32 [n] to (uint8 codes [n], fp32 scales [ceil(n / 256)]); the last block may be
    short.

    Scales are signed: the map holds 1 but not -1, and a scale that is represented exactly gives the
    same codes and scales when a checkpoint is quantized again. Unsigned values (second moments) are
    rounded to 0 only if they are 0: otherwise a gradient far below its block's largest would be
    divided by epsilon alone.
    """
    blocks = _blocks(values)
    scales = blocks.gather(1, blocks.abs().argmax(1, keepdim=True)).squeeze(1)
    # a block of zeros would divide by 0
    scales = torch.where(scales.abs() < 1e-12, 1e-12, scales)
    codes = torch.bucketize(blocks / scales[:, None], midpoints(signed, values.device))
    if not signed:
        codes.clamp_min_((blocks > 0).to(codes.dtype))
    return codes.to(torch.uint8).view(-1)[: values.numel()], scales


def dequantize(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Invert `quantize`: uint8 [n], fp32 [ceil(n / 256)] -> fp32 [n]."""
    values = levels(signed, codes.device)[_blocks(codes).int()]
    return values.mul_(scales[:, None]).view(-1)[: codes.numel()]


def scale_count(elements: int) -> int:
    """Return the number of scales for `elements` codes."""
    return -(-elements // BLOCK_ELEMENTS)


def _blocks(flat: Tensor) -> Tensor:
    missing = -flat.numel() % BLOCK_ELEMENTS
    padded = torch.nn.functional.pad(flat, (0, missing)) if missing else flat
    return padded.view(-1, BLOCK_ELEMENTS)


@functools.cache
def levels(signed: bool, device: torch.device) -> Tensor:
    """Return the 256 values of the codes, ascending, in [-1, 1] or [0, 1].

    Smaller exponents leave fewer bits for the fraction: seven decades, of which the largest has 64
    (signed) or 128 levels.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        # equal parts of the decade [10^(exponent - 7), 10^(exponent - 6)], each by its midpoint
        edges = torch.linspace(0.1, 1.0, 2**exponent * (1 if signed else 2) + 1, dtype=torch.double)
        fractions = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - 6)).tolist()
        values += fractions
        if signed:
            values += [-fraction for fraction in fractions]
    assert len(values) == 256
    return torch.tensor(sorted(values), device=device)


@functools.cache
def midpoints(signed: bool, device: torch.device) -> Tensor:
    """Return the 255 midpoints between levels; a value on one is rounded down."""
    found = levels(signed, device)
    return (found[:-1] + found[1:]) / 2
