"""Seconds of a GPU's work, by the shapes of its products, its kernels and its host's calls."""

from collections.abc import Iterable
from functools import cache

from launcher.config.resolve import Resolved
from launcher.forecast.efficiency import (
    FP8_GAIN,
    FUSED_RATE,
    KERNEL_S,
    RING_ATTENTION,
    backend_rate,
    busy_share,
)
from launcher.forecast.machine import Machine
from launcher.forecast.trace.work import Product, Work
from launcher.measure.hardware import Gpu, find_gpu


def device_s(work: Work, resolved: Resolved, machine: Machine, type_: str) -> float:
    """Return the time of the kernels themselves, one after the other.

    Of a GPU that is not in the table only what its profile measured counts.
    """
    gpu = find_gpu(machine.name)
    backend = backend_rate(resolved.model.sdpa_backend, gpu)
    score_rate = backend * machine.attention_flops_per_s[type_] / ring_slowdown(resolved)
    kernels = work.kernels if gpu is not None else 0
    return (
        products_s(work, machine, type_)
        + work.attention_flops / score_rate
        + moved_s(work, machine)
        + kernels * KERNEL_S
    )


def moved_s(work: Work, machine: Machine) -> float:
    """Return the time of what memory bounds."""
    fused_bytes_per_s = FUSED_RATE * machine.copy_bytes_per_s
    return (
        work.elementwise_bytes / machine.elementwise_bytes_per_s
        + work.copied_bytes / machine.copy_bytes_per_s
        + work.fused_bytes / fused_bytes_per_s
    )


def ring_slowdown(resolved: Resolved) -> float:
    """Seconds of ring attention over those of whole sequences: of what each of n ranks scores, the
    keys of n - 1 have come from others."""
    sharding = resolved.config.sharding
    ranks = sharding.context_parallel
    if ranks == 1 or sharding.context_parallel_method != "ring":
        return 1.0
    return (1 + (ranks - 1) / RING_ATTENTION) / ranks


def products_s(work: Work, machine: Machine, type_: str) -> float:
    """Return the time of all products. Results are written when complete, beside nothing else."""
    rate, gpu = machine.matmul_flops_per_s[type_], find_gpu(machine.name)
    if gpu is None:
        return work.matmul_flops / rate
    seconds = 0.0
    for product, times in work.products.items():
        flops, written_bytes = _cost(product, gpu)
        own_rate = FP8_GAIN * rate if product.fp8 else rate
        seconds += times * (flops / own_rate + written_bytes / machine.copy_bytes_per_s)
    return seconds


def achieved_flops_per_s(
    products: Iterable[Product], seconds: float, gpu: Gpu, copy_bytes_per_s: float
) -> float:
    """The rate at which `products_s` would have taken so many seconds for these products."""
    costs = [_cost(product, gpu) for product in products]
    written_s = sum(size_bytes for _, size_bytes in costs) / copy_bytes_per_s
    return sum(flops for flops, _ in costs) / (seconds - written_s)


@cache
def _cost(product: Product, gpu: Gpu) -> tuple[float, float]:
    """(FLOPs, as if all multiprocessors were busy; bytes of the result)."""
    batch, rows, columns = product.batch, product.rows, product.columns
    busy = busy_share(rows, columns, gpu.multiprocessors, batch=batch, inner=product.inner)
    return product.flops / busy, product.element_bytes * batch * rows * columns
