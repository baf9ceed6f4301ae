"""The update of LowPrecisionAdamW as one Triton kernel per tensor, in place and without copies.

Imported where a tensor on a GPU is updated: Triton comes with torch's builds for GPUs only. The
arithmetic is that of `low_precision`, in fp32 and step by step, and so are the codes of
`blockwise`; its interpreter (TRITON_INTERPRET=1) runs the same on CPU tensors.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from launcher.optim.blockwise import BLOCK_ELEMENTS, levels, midpoints

_BLOCKS: Final = 8
"""Blocks of 256 elements, for each program."""


def update(
    weight: Tensor,
    gradient: Tensor,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    found_inf: Tensor | None,
) -> None:
    """One step of a flat, dense `weight` and its states; nothing is written if `found_inf` is 1.

    `state["step"]`, on the device as well, counts this step already. Never waits for the device.
    """
    lr, (beta1, beta2) = group["lr"], group["betas"]
    elements = weight.numel()
    _adamw[(triton.cdiv(elements, _BLOCKS * BLOCK_ELEMENTS),)](
        weight,
        state.get("compensation"),
        gradient.contiguous(),
        state["exp_avg"],
        state.get("exp_avg_scale"),
        state["exp_avg_sq"],
        state.get("exp_avg_sq_scale"),
        *_tables(weight.device),
        state["step"],
        found_inf,
        elements,
        lr,
        1 - lr * group["weight_decay"],
        BETA1=beta1,
        BETA2=beta2,
        LOG2_BETA1=_log2(beta1),
        LOG2_BETA2=_log2(beta2),
        EPS=group["eps"],
        BLOCKS=_BLOCKS,
        BLOCK_ELEMENTS=BLOCK_ELEMENTS,
        enable_fp_fusion=False,  # a fused product and sum would leave another remainder
    )


def _log2(beta: float) -> float:
    return math.log2(beta) if beta else -math.inf


@functools.cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Levels and edges of the signed map, then of the unsigned one. Code i stands for what is above
    edge i, up to edge i + 1."""
    end = torch.full((1,), math.inf, device=device)
    signed, unsigned = (
        (levels(signed, device), torch.cat([-end, midpoints(signed, device), end]))
        for signed in (True, False)
    )
    return *signed, *unsigned


@triton.jit
def _adamw(
    weight,
    compensation,
    gradient,
    first,
    first_scale,
    second,
    second_scale,
    signed_levels,
    signed_edges,
    unsigned_levels,
    unsigned_edges,
    step,
    found_inf,
    elements,
    lr: tl.float64,  # Triton passes a Python float as fp32 where nothing is declared
    kept,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    LOG2_BETA1: tl.constexpr,
    LOG2_BETA2: tl.constexpr,
    EPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,
):
    """`kept` is what weight decay leaves of a weight."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    at = block * BLOCK_ELEMENTS + tl.arange(0, BLOCK_ELEMENTS)[None, :]
    if found_inf is not None:
        elements = tl.where(tl.load(found_inf) == 0, elements, 0)
    inside, block_inside = at < elements, block * BLOCK_ELEMENTS < elements
    # In fp64, as Python has them: 1 - 0.999 has four digits in fp32.
    count = tl.load(step).to(tl.float64)
    rate = (lr / (1 - tl.exp2(count * LOG2_BETA1))).to(tl.float32)
    scale = tl.sqrt(1 - tl.exp2(count * LOG2_BETA2)).to(tl.float32)

    g = tl.load(gradient + at, inside, other=0.0).to(tl.float32)
    m = _load_moment(first, first_scale, signed_levels, at, inside, block, block_inside)
    m = m + (1 - BETA1) * (g - m) if 1 - BETA1 < 0.5 else g - (g - m) * BETA1  # torch's lerp
    v = _load_moment(second, second_scale, unsigned_levels, at, inside, block, block_inside)
    v = v * BETA2 + (1 - BETA2) * g * g
    w = tl.load(weight + at, inside, other=0.0).to(tl.float32)
    if compensation is not None:
        w += tl.load(compensation + at, inside, other=0.0).to(tl.float32)
    w = w * kept + tl.div_rn(-rate * m, tl.div_rn(tl.sqrt_rn(v), scale) + EPS)

    _store_moment(first, first_scale, signed_edges, at, inside, block, block_inside, m, SIGNED=True)
    _store_moment(
        second, second_scale, unsigned_edges, at, inside, block, block_inside, v, SIGNED=False
    )
    stored = w.to(weight.dtype.element_ty)
    tl.store(weight + at, stored, inside)
    if compensation is not None:
        tl.store(compensation + at, (w - stored.to(tl.float32)).to(tl.bfloat16), inside)


@triton.jit
def _load_moment(moment, scales, levels, at, inside, block, block_inside):
    stored = tl.load(moment + at, inside, other=0)
    if scales is None:
        return stored.to(tl.float32)
    else:
        scale = tl.load(scales + block, block_inside, other=0.0)
        # Beyond the end there is no code, and what fills a last short block has to be 0.
        return tl.load(levels + stored.to(tl.int32), inside, other=0.0) * scale


@triton.jit
def _store_moment(
    moment, scales, edges, at, inside, block, block_inside, values, SIGNED: tl.constexpr
):
    if scales is None:
        tl.store(moment + at, values.to(moment.dtype.element_ty), inside)
    else:
        if SIGNED:
            largest = tl.argmax(tl.abs(values), 1, keep_dims=True)
            here = tl.arange(0, values.shape[1])[None, :] == largest
            scale = tl.sum(tl.where(here, values, 0.0), 1, keep_dims=True)
        else:
            scale = tl.max(values, 1, keep_dims=True)
        scale = tl.where(tl.abs(scale) < 1e-12, 1e-12, scale)
        codes = _code(tl.div_rn(values, scale), edges, SIGNED)
        if not SIGNED:
            codes = tl.maximum(codes, (values > 0).to(tl.int32))
        tl.store(scales + block, scale, block_inside)
        tl.store(moment + at, codes.to(tl.uint8), inside)


@triton.jit
def _code(value, edges, SIGNED: tl.constexpr):
    """Return the code whose two edges have `value`, in [-1, 1], between them.

    Within a decade all codes are equally wide, so that arithmetic finds it but for its neighbours,
    and two look-ups correct that; a search of 256 would take eight.
    """
    size = tl.abs(value)
    decade = tl.zeros(size.shape, tl.int32)  # 0 below 1e-6, 6 from 0.1
    power = tl.full(size.shape, 1e6, tl.float32)  # which brings it to [0.1, 1)
    for exponent in tl.static_range(6):
        above = size >= 10.0 ** (exponent - 6)
        decade += above.to(tl.int32)
        power = tl.where(above, 10.0 ** (5 - exponent), power)
    smallest = 1 if SIGNED else 2
    count = smallest << decade  # of codes in it; all decades below have `smallest` fewer
    # equal parts of [0.1, 1) that are below it
    within = (size * power - 0.1) / 0.9 * count.to(tl.float32)
    rank = count - smallest + 1 + within.to(tl.int32)  # + 1: the code of 0
    if SIGNED:
        rank = 127 + tl.where(value < 0, -rank, rank)  # 127 is the code of 0
    rank = tl.minimum(tl.maximum(rank, 0), 255)
    above = (value > tl.load(edges + rank + 1)).to(tl.int32)
    return rank + above - (value <= tl.load(edges + rank)).to(tl.int32)
