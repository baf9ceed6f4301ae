"""Triton kernels of a block: norms, SwiGLU and the rotary embedding, each in one pass.

Imported where a GPU's tensors are at hand; anywhere else triton may be absent. All compute in fp32.
Sizes of tiles are those that were fastest on an H200 of the ones tried for rows of 768 to 4096.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

_SWIGLU_BLOCK = 2048
_SUMMED = tl.constexpr(128)  # rows at a time, of which there are a multiple
_SUMMED_COLUMNS = 32
_LARGEST_INT32 = 2**31 - 1
_compiled: dict[Any, Any] = {}


@triton.jit(do_not_specialize=("rows", "eps"))
def _norm(
    x,
    weight,
    bias,
    y,
    means,
    rstds,
    rows,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """One program for ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if CENTERED:
        mean = tl.sum(value, axis=1) / WIDTH
        value = tl.where(inside, value - mean[:, None], 0.0)  # outside it is -mean
        tl.store(means + row, mean, mask=row < rows)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(value * value, axis=1) / WIDTH + eps)  # tl.sqrt is approximate
    tl.store(rstds + row, rstd, mask=row < rows)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    out = value * rstd[:, None] * scale[None, :]
    if CENTERED:
        out += tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("rows", "rows_each"))
def _norm_gradient(
    grad,
    x,
    weight,
    means,
    rstds,
    added,
    grad_x,
    sums,
    rows,
    rows_each,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTERED: tl.constexpr,
    ADDED: tl.constexpr,
):
    """One program for `rows_each` rows, which it also sums up for the weight and the bias."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    of_weight = tl.zeros((BLOCK,), tl.float32)
    of_bias = tl.zeros((BLOCK,), tl.float32)
    for row in range(program * rows_each, min(program * rows_each + rows_each, rows)):
        at = row * WIDTH + column
        rstd = tl.load(rstds + row)
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        if CENTERED:
            value -= tl.load(means + row)
        normed = tl.where(inside, value * rstd, 0.0)
        scaled = slope * scale
        of_weight += slope * normed
        # dx = rstd (g - n mean(g n) - mean(g)), with g = dy w, n the normed x; mean(g) if centered.
        change = scaled - normed * (tl.sum(scaled * normed, axis=0) / WIDTH)
        if CENTERED:
            of_bias += slope
            change -= tl.sum(scaled, axis=0) / WIDTH
        change *= rstd
        if ADDED:
            change += tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + at, change.to(grad_x.dtype.element_ty), mask=inside)
    sums += program * WIDTH + column
    tl.store(sums, of_weight, mask=inside)
    if CENTERED:
        tl.store(sums + tl.num_programs(0).to(tl.int64) * WIDTH, of_bias, mask=inside)


@triton.jit
def _norm_sums(
    sums, of_weight, of_bias, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):
    """One program for COLUMNS columns of one matrix: the weight's, or the bias's."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    kind = tl.program_id(1)
    inside = column < WIDTH
    at = kind.to(tl.int64) * ROWS * WIDTH + tl.arange(0, _SUMMED)[:, None] * WIDTH + column[None, :]
    total = tl.zeros((_SUMMED, COLUMNS), tl.float32)
    for start in range(0, ROWS, _SUMMED):
        total += tl.load(sums + at + start * WIDTH, mask=inside[None, :], other=0.0)
    out = tl.sum(total, axis=0).to(of_weight.dtype.element_ty)
    tl.store(of_weight + column, out, mask=inside & (kind == 0))
    tl.store(of_bias + column, out, mask=inside & (kind == 1))


@triton.jit
def _swiglu(x, y, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    x += row * 2 * WIDTH + column
    gate = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + WIDTH, mask=inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * value
    tl.store(y + row * WIDTH + column, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_gradient(grad, x, grad_x, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = row * 2 * WIDTH + column
    gate = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(grad + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    # silu'(g) = s (1 + g (1 - s)), with s = sigmoid(g).
    of_gate = slope * value * share * (1.0 + gate * (1.0 - share))
    of_value = slope * gate * share
    tl.store(grad_x + at, of_gate.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_x + at + WIDTH, of_value.to(grad_x.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("of_row", "tokens", "heads", "sign"))
def _rotate(
    x,
    cos,
    sin,
    of_row,
    tokens,
    heads,
    sign,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One program for all heads of a token, which lie behind each other."""
    row = tl.program_id(0).to(tl.int64)
    pair, head = tl.arange(0, BLOCK)[None, :], tl.arange(0, HEADS)[:, None]
    inside = (head < heads) & (pair < HALF)
    angle = (row % tokens) * HALF + pair  # of the row's position
    c = tl.load(cos + angle, mask=pair < HALF, other=0.0)
    s = tl.load(sin + angle, mask=pair < HALF, other=0.0) * sign
    x += row * of_row + head * 2 * HALF + pair
    left = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(x + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(x, (left * c - right * s).to(x.dtype.element_ty), mask=inside)
    tl.store(x + HALF, (right * c + left * s).to(x.dtype.element_ty), mask=inside)


# What `launcher.model.fused` defines, with what its operators return as the last argument.


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Fill y, means and rstds of x [..., d]."""
    rows, width = out[-1].numel(), x.size(-1)
    block = _power_of_two(width)
    at_a_time = max(1, min(4, 2**14 // block))
    _launch(
        _norm,
        (_up(rows, at_a_time), 1, 1),
        (x, weight, weight if bias is None else bias, *out),
        (rows, eps),
        (width, block, at_a_time, bias is not None),
        warps=_warps(block * at_a_time, 2048),
    )


def norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    means: Tensor,
    rstds: Tensor,
    centered: bool,
    added: Tensor | None,
    out: list[Tensor],
) -> None:
    """Fill the gradient of x, with what is `added` to it; sums [1 or 2, programs, d], and the
    gradients [d] of weight and bias, or of a weight alone, that these add up to."""
    of_x, sums, *_ = out
    (kinds, programs, width), rows = sums.shape, rstds.numel()
    block = _power_of_two(width)
    _launch(
        _norm_gradient,
        (programs, 1, 1),
        (grad, x, weight, means, rstds, grad if added is None else added, of_x, sums),
        (rows, _up(rows, programs)),
        (width, block, centered, added is not None),
        warps=_warps(block, 512),
    )
    grid = (_up(width, _SUMMED_COLUMNS), kinds, 1)
    sizes = (programs, width, _SUMMED_COLUMNS)
    # Without a bias out[-1] is the weight's too, and no program is of the second kind.
    _launch(_norm_sums, grid, (sums, out[2], out[-1]), (), sizes, warps=4)


def swiglu(x: Tensor, out: Tensor) -> None:
    """Fill y [..., f] of x [..., 2 f]."""
    _of_halves(_swiglu, out.numel(), out.size(-1), x, out)


def swiglu_backward(grad: Tensor, x: Tensor, out: Tensor) -> None:
    """Fill the gradient of x [..., 2 f]."""
    _of_halves(_swiglu_gradient, grad.numel(), grad.size(-1), grad, x, out)


def _of_halves(kernel: Any, elements: int, width: int, *tensors: Tensor) -> None:
    block = min(_SWIGLU_BLOCK, _power_of_two(width))
    grid = (elements // width, _up(width, block), 1)
    _launch(kernel, grid, tensors, (), (width, block), warps=4)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool, out: Tensor) -> None:
    """Turn x [B*T, H * head_dim], or turn it back, where it is; `out` is x."""
    tokens, _, half = cos.shape
    heads = x.size(1) // (2 * half)
    block, of_heads = _power_of_two(half), _power_of_two(heads)
    _launch(
        _rotate,
        (x.size(0), 1, 1),
        (out, cos, sin),
        (out.stride(0), tokens, heads, -1.0 if back else 1.0),
        (half, block, of_heads),
        warps=_warps(block * of_heads, 512),
    )


def _launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    constants: tuple[int, ...],
    *,
    warps: int,
) -> None:
    """Launch what was compiled for such arguments. Triton's own look-up takes four times as long as
    the launch, and a step has hundreds.

    Kernels are compiled for types of tensors and their alignment, and for the width of integers;
    for no values, but of constants.
    """
    if 0 in grid:  # no rows
        return
    types = tuple([tensor.dtype for tensor in tensors])
    key = (kernel.fn, tensors[0].get_device(), types, constants)
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    usual = aligned and max(numbers, default=0) <= _LARGEST_INT32
    if usual and key in _compiled:
        _compiled[key][grid](*tensors, *numbers, *constants)
        return
    compiled = kernel[grid](*tensors, *numbers, *constants, num_warps=warps)
    if usual and compiled is not None:  # as of Triton's interpreter
        _compiled[key] = compiled


# Triton's own of these two are made for kernels, and slow outside.
def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _up(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _warps(elements: int, each: int) -> int:
    return max(1, min(16, elements // each))
