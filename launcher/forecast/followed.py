"""One step on a timeline: `launcher.train`'s loop and its `train_step`, event by event."""

from collections.abc import Iterable

from launcher.config.resolve import Resolved
from launcher.forecast.buffers import Buffers
from launcher.forecast.timeline import Timeline
from launcher.forecast.trace.allocation_summaries import AllocationSummary
from launcher.forecast.trace.events import Allocated, Freed, Gradient, Module, Place, Tuned
from launcher.forecast.trace.shortened import Seen, Shortened
from launcher.measure.hardware import Gpu
from launcher.strategies.rank import Rank
from launcher.util.sizes import MIB

INT64 = 8
TUNING_BYTES = 60 * MIB
"""L2 cache of a GPU that is not known, as of an H200."""
# Micro-batches that are followed: the first, the last and, in a first step, one between, in which
# DDP's buckets are not yet rebuilt and ZeRO-3 fetches ahead for the first time. Others repeat them.
_FOLLOWED = {"first_step": 3, "steady": 2}


def follow_step(
    rank: Rank, timeline: Timeline, buffers: Buffers, trace: Shortened, gpu: Gpu | None
) -> None:
    """Follow a step of all its micro-batches, as the timeline's period has them."""
    # torch.compile flushes the L2 cache before it times a kernel (get_device_cache_size in torch
    # 2.13.0's torch/_inductor/runtime/benchmarking.py)
    l2_bytes = TUNING_BYTES if gpu is None else gpu.l2_mib * MIB
    accumulation = rank.resolved.accumulation
    sequences = accumulation * rank.resolved.config.data.micro_batch
    tensors = 3 if rank.resolved.config.data.document_attention else 2
    _read(timeline, sequences, rank.resolved, tensors)
    count = min(accumulation, _FOLLOWED[timeline.period])
    for number in range(1, count + 1):
        tuning_bytes = l2_bytes if timeline.period == "first_step" and number == 1 else 0
        timeline.enter("forward")
        buffers.begin_forward(last=number == count)
        run_segments(trace.forward, timeline, buffers, tuning_bytes)
        buffers.end_forward()
        timeline.enter("backward")
        run_segments(trace.backward, timeline, buffers, tuning_bytes)
        buffers.end_backward()
        _follow(trace.left, timeline, buffers, tuning_bytes)
    timeline.enter("step")
    buffers.step()


def _read(timeline: Timeline, sequences: int, resolved: Resolved, tensors: int) -> None:
    timeline.enter("data")
    seq_len, size_bytes = resolved.local_seq_len, INT64 * sequences
    if seq_len == resolved.seq_len:  # parts of sequences are cut out before they are tensors
        # one token more than inputs, since targets are shifted by one
        timeline.allocate("rows", size_bytes * (seq_len + 1), "temporary")
    timeline.allocate("next batch", tensors * size_bytes * seq_len, "activations")
    timeline.free("rows")
    timeline.free("batch")  # the batch before lives until this one is there
    timeline.rename("next batch", "batch", "activations")


def run_segments(
    segments: Iterable[tuple[Place, list[Seen]]],
    timeline: Timeline,
    buffers: Buffers,
    tuning_bytes: int,
) -> None:
    """Follow segments of a micro-batch, with what the strategy does before and after each.

    Args:
        tuning_bytes: what timing a compiled kernel takes; 0 where none is compiled.
    """
    for place, events in segments:
        buffers.enter(place)
        _follow(events, timeline, buffers, tuning_bytes)
        buffers.leave(place)


def _follow(
    events: Iterable[Seen], timeline: Timeline, buffers: Buffers, tuning_bytes: int
) -> None:
    allocate, free = timeline.allocate, timeline.free
    for event in events:
        # The innermost loop of a plan: bound methods, and no isinstance.
        if type(event) is AllocationSummary:
            timeline.run(event)
        elif type(event) is Allocated:
            allocate(event.key, event.size_bytes, event.category, where=event.where)
        elif type(event) is Freed:
            free(event.key)
        elif type(event) is Gradient:
            buffers.gradient(event.key, event.parameter)
        elif type(event) is Module:
            buffers.module(event)
        elif type(event) is Tuned and tuning_bytes:
            allocate("tuning copies", event.copied_bytes, "temporary")
            allocate("tuning", tuning_bytes, "temporary")
            free("tuning")
            free("tuning copies")
