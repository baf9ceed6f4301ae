"""Seconds of a GPU's work, by the shapes of its products, its kernels and its host's calls."""

from functools import cache

from launcher.config.resolve import Resolved
from launcher.measure.hardware import Gpu
from launcher.model.attention import kernel_for
from launcher.plan.efficiency import (
    COMPILED_ELEMENTWISE,
    COMPILED_OPERATORS,
    FP8_CAST_BYTES,
    FP8_COMPILED_CAST_BYTES,
    FP8_GAIN,
    KERNEL_S,
    KERNELS_PER_OPERATOR,
    busy_share,
    gpu_of,
)
from launcher.plan.machine import Machine
from launcher.plan.operators import tokens_of
from launcher.plan.work import Work

HALF_BYTES = 2


def device_s(work: Work, resolved: Resolved, machine: Machine, type_: str) -> float:
    """Of the kernels themselves, one after the other.

    Of a GPU that is not in the table only what its profile measured counts.
    """
    compiled = resolved.config.loop.compile
    product_rate = product_flops_per_s(resolved, machine, type_)
    fused = kernel_for(resolved.own_model).fused
    score_rate = machine.attention_flops_per_s[type_] if fused else product_rate
    moving_rate = machine.elementwise_bytes_per_s * (COMPILED_ELEMENTWISE if compiled else 1)
    known = gpu_of(machine.name) is not None
    kernels = KERNELS_PER_OPERATOR * dispatched(work, resolved) if known else 0
    return (
        work.matmul_flops / product_rate
        + work.attention_flops / score_rate
        + work.elementwise_bytes / moving_rate
        + work.copied_bytes / machine.copy_bytes_per_s
        + kernels * KERNEL_S
    )


def dispatched(work: Work, resolved: Resolved) -> float:
    """Operators that the host starts."""
    return work.operators * (COMPILED_OPERATORS if resolved.config.loop.compile else 1)


def product_flops_per_s(resolved: Resolved, machine: Machine, type_: str) -> float:
    """Of all linears and the head together, forward and both gradients."""
    rate = machine.matmul_flops_per_s[type_]
    gpu = gpu_of(machine.name)
    model, fp8 = resolved.own_model, resolved.config.optim.precision == "fp8"
    if gpu is None:
        return rate
    element = 4 if type_ in ("fp32", "tf32") else HALF_BYTES
    copy, rows, casts = machine.copy_bytes_per_s, tokens_of(resolved), 0
    in_blocks = rate
    if fp8:
        in_blocks *= FP8_GAIN
        casts = FP8_COMPILED_CAST_BYTES if resolved.config.loop.compile else FP8_CAST_BYTES
    of_block = _products_s(model.linear_shapes, rows, in_blocks, gpu, (element, casts), copy)
    head = ((model.d_model, model.vocab_size),)
    of_head = _products_s(head, rows, rate, gpu, (element, 0), copy)
    flops = 6 * rows * model.matmul_parameter_count
    return flops / (model.layers * of_block + of_head)


@cache
def _products_s(
    shapes: tuple[tuple[int, int], ...],
    rows: int,
    flops_per_s: float,
    gpu: Gpu,
    element_bytes: tuple[int, int],
    copy_bytes_per_s: float,
) -> float:
    """Seconds of linears of (inputs, outputs) over so many rows: the product, and the gradients of
    its input and of its weight. Results are written when they are complete, beside nothing;
    `element_bytes` are those of a result, and what casts of an operand move."""
    written, casts = element_bytes
    total = 0.0
    for inner, outer in shapes:
        for lines, columns, across in (
            (rows, outer, inner),
            (rows, inner, outer),
            (outer, inner, rows),
        ):
            share = busy_share(lines, columns, gpu.multiprocessors)
            moved = written * lines * columns + casts * across * (lines + columns)
            total += 2 * rows * inner * outer / (flops_per_s * share) + moved / copy_bytes_per_s
    return total
