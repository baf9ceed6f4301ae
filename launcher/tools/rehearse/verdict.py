"""Verdicts on a rehearsed program: its recorded allocations on each GPU of the table."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from launcher.forecast.allocator import AllocatorUse, replay
from launcher.forecast.fit import Verdict, verdict, within
from launcher.forecast.order import VERDICTS
from launcher.measure.hardware import CONTEXT_BYTES, GPUS, NCCL_GROUP_BYTES, Gpu
from launcher.tools.rehearse.stage import Stage
from launcher.tools.watch.content import allocator_events


@dataclass(frozen=True, kw_only=True, slots=True)
class CardFit:
    """The program on one GPU; bytes are the worst rank's."""

    gpu: str
    memory_bytes: int
    used_bytes: int | None
    """Reserved, context and NCCL; None where it ran out of memory."""
    verdict: Verdict
    step_s: float | None = None
    """Predicted seconds of a step of the slowest rank; None where no step was seen whole, and where
    the program cannot run."""
    lacks: str | None = None
    """Format of the program's products that the GPU has not: fp8, without which they fail, or bf16,
    which is far slower there; seconds are then those of fp16."""


def outside_bytes(world_size: int) -> int:
    """Memory of a process that torch's allocator does not hold: context and NCCL's buffers."""
    return CONTEXT_BYTES + (NCCL_GROUP_BYTES if world_size > 1 else 0)


def on_every_gpu(stage: Stage) -> list[CardFit]:
    """Replay all ranks' allocations on each GPU of the table, smallest first."""
    replays = [
        partial(replay, *allocator_events(one), expandable_segments=one.expandable_segments)
        for one in stage.recordings.values()
    ]
    beside = stage.beside()
    taken = [beside.get(rank, 0) for rank in stage.recordings]
    free = [without_limit() for without_limit in replays]
    outside = outside_bytes(stage.world_size)
    cards = []
    for gpu in sorted(GPUS, key=lambda gpu: gpu.memory_bytes):
        limit = gpu.memory_bytes - outside
        reserved = [
            more + _reserved(use, again, limit - more)
            for use, again, more in zip(free, replays, taken, strict=True)
        ]
        used = outside + max(stage.others_bytes, *reserved)
        found = verdict(used, gpu.memory_bytes)
        cards.append(
            CardFit(
                gpu=gpu.name,
                memory_bytes=gpu.memory_bytes,
                used_bytes=None if found == VERDICTS[-1] else used,
                verdict=found,
            )
        )
    return cards


def _reserved(use: AllocatorUse, again: Callable[..., AllocatorUse], limit: int) -> int:
    """Return what a rank reserves within a limit; one byte too many where it runs out of memory."""
    if use.peak_reserved_bytes <= limit:  # which changes nothing that the allocator does
        return use.peak_reserved_bytes
    if use.peak_allocated_bytes > limit:  # no replay is needed to know
        return limit + 1
    return within(again(limit_bytes=limit), limit)


def lacking_format(gpu: Gpu, formats: Collection[str]) -> str | None:
    """Return which of the formats of a program's products a GPU's tensor cores have not."""
    if "fp8" in formats and gpu.fp8_flops_per_s is None:
        return "fp8"
    return "bf16" if "bf16" in formats and gpu.bf16_flops_per_s is None else None
