"""Seconds of a GPU's work, by the shapes of its products, its kernels and its host's calls."""

from functools import cache

from launcher.config.resolve import Resolved
from launcher.forecast.efficiency import (
    COMPILED_ELEMENTWISE,
    COMPILED_OPERATORS,
    FP8_CAST_BYTES,
    FP8_COMPILED_CAST_BYTES,
    FP8_GAIN,
    KERNEL_S,
    KERNELS_PER_OPERATOR,
    RING_ATTENTION,
    backend_rate,
    busy_share,
    gpu_of,
)
from launcher.forecast.machine import Machine
from launcher.forecast.operators import tokens_of
from launcher.forecast.work import Work
from launcher.measure.hardware import Gpu
from launcher.model.attention import fuses_scores
from launcher.model.config import ModelConfig

HALF_BYTES = 2


def device_s(work: Work, resolved: Resolved, machine: Machine, type_: str) -> float:
    """Of the kernels themselves, one after the other.

    Of a GPU that is not in the table only what its profile measured counts.
    """
    compiled = resolved.config.loop.compile
    product_rate = product_flops_per_s(resolved, machine, type_)
    model = resolved.own_model
    score_rate = product_rate
    if fuses_scores(model):
        backend = backend_rate(model.sdpa_backend, gpu_of(machine.name))
        score_rate = backend * machine.attention_flops_per_s[type_] / ring_slowdown(resolved)
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


def ring_slowdown(resolved: Resolved) -> float:
    """Seconds of ring attention over those of whole sequences: of what each of n ranks scores, the
    keys of n - 1 have come from others."""
    sharding = resolved.config.sharding
    ranks = sharding.context_parallel
    if ranks == 1 or sharding.context_parallel_method != "ring":
        return 1.0
    return (1 + (ranks - 1) / RING_ATTENTION) / ranks


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
    rows, casts = tokens_of(resolved), 0
    in_blocks = rate
    if fp8:
        in_blocks *= FP8_GAIN
        casts = FP8_COMPILED_CAST_BYTES if resolved.config.loop.compile else FP8_CAST_BYTES
    head = ((model.d_model, model.vocab_size),)
    of_block, block_bytes = _costs(model.linear_shapes, rows, gpu, element, casts)
    of_head, head_bytes = _costs(head, rows, gpu, element, 0)
    seconds = model.layers * of_block / in_blocks + of_head / rate
    seconds += (model.layers * block_bytes + head_bytes) / machine.copy_bytes_per_s
    return 6 * rows * model.matmul_parameter_count / seconds


def achieved_flops_per_s(
    model: ModelConfig, rows: int, seconds: float, gpu: Gpu, element_bytes: int, copy: float
) -> float:
    """The rate at which `product_flops_per_s` would have taken so many seconds for all linears and
    the head; `copy` in bytes/s."""
    head = ((model.d_model, model.vocab_size),)
    ideal = moving = 0.0
    for shapes, times in ((model.linear_shapes, model.layers), (head, 1)):
        busy, moved = _costs(shapes, rows, gpu, element_bytes, 0)
        ideal += times * busy
        moving += times * moved / copy
    return ideal / (seconds - moving)


@cache
def _costs(
    shapes: tuple[tuple[int, int], ...],
    rows: int,
    gpu: Gpu,
    element_bytes: int,
    cast_bytes: int,
) -> tuple[float, float]:
    """(FLOPs, as if all multiprocessors were busy; bytes) of linears of (inputs, outputs) over so
    many rows: the product, and the gradients of its input and of its weight.

    Results, of `element_bytes` each, are written when they are complete, beside nothing;
    `cast_bytes` is what casts move for an element of an operand.
    """
    flops = moved = 0.0
    for inner, outer in shapes:
        for lines, columns, across in (
            (rows, outer, inner),
            (rows, inner, outer),
            (outer, inner, rows),
        ):
            busy = busy_share(lines, columns, gpu.multiprocessors)
            flops += 2 * rows * inner * outer / busy
            moved += element_bytes * lines * columns + cast_bytes * across * (lines + columns)
    return flops, moved
