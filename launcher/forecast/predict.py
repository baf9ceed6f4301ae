"""The bytes of one rank of a run, without a GPU, a process group or the model's memory."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from launcher.config.resolve import Resolved
from launcher.forecast.buffers import Buffers
from launcher.forecast.strategies import forecast_of
from launcher.forecast.timeline import Timeline
from launcher.forecast.trace.allocation_summaries import AllocationSummary
from launcher.forecast.trace.asked import asked_of
from launcher.forecast.trace.blocks import on_host, trace_micro_batch
from launcher.forecast.trace.events import (
    Allocated,
    Freed,
    Gradient,
    MicroBatch,
    Module,
    Place,
    Tuned,
)
from launcher.forecast.trace.shortened import Seen, Shortened, shortened
from launcher.forecast.trace.template import local_rows
from launcher.measure.hardware import Gpu
from launcher.parallel.mesh import Mesh
from launcher.strategies import strategy_of
from launcher.strategies.base import unknown_versions
from launcher.strategies.ledger import CATEGORIES, Ledger
from launcher.strategies.offload_sizes import offload_sizes
from launcher.strategies.parameters import parameter_shapes
from launcher.strategies.rank import Rank
from launcher.util.errors import UserError
from launcher.util.sizes import MIB

INT64 = 8
# Size of a GPU's L2 cache, which torch.compile flushes before it times a kernel
# (get_device_cache_size in torch 2.13.0's torch/_inductor/runtime/benchmarking.py): 60 MiB as torch
# reports for an H200; 40 MiB on an A100, 50 on an H100.
TUNING_BYTES = 60 * MIB
# Micro-batches that are followed: the first, the last and, in a first step, one between, in which
# DDP's buckets are not yet rebuilt and ZeRO-3 fetches ahead for the first time. Others repeat them.
_FOLLOWED = {"first_step": 3, "steady": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One rank's bytes, in the records that the measuring side writes."""

    held: Ledger
    """States between two steps."""
    first_step: Ledger
    """At the peak of the first step, which allocates the optimizer states."""
    peak: Ledger
    """At the highest moment of any later step."""
    peaks: dict[tuple[str, str], int]
    """(period, phase) -> highest bytes on the device; periods init, first_step, steady, save,
    resume."""
    host_bytes: int
    """Host memory that offload needs at most, for this rank: states and staging buffers."""
    disk_bytes: int
    """Bytes on disk that offload needs, for this rank."""
    micro_batch_bytes: int
    """On the device at the peak of a micro-batch without what holds the model: no strategy that
    computes alike has less."""
    events: Iterable[tuple[int, int]] = field(repr=False)
    """(storage, bytes) in program order, 0 bytes = freed: what an allocator is asked for."""
    streams: Mapping[int, str] = field(repr=False)
    """Storage -> the stream it is allocated on, where that is not the one that computes."""

    @property
    def peak_bytes(self) -> int:
        """Highest bytes on the device in the whole run."""
        return max(self.peaks.values())


def predict(
    resolved: Resolved,
    *,
    world_size: int,
    device_type: str,
    rank: int | None = None,
    gpu: Gpu | None = None,
    memory_bytes: int | None = None,
) -> Prediction:
    """Follow two steps of a resolved run, as rank `rank` of `world_size`; None for the worst: the
    shards of the first one and, where sequences are cut, the part of the last one.

    The bytes are those of live tensors and workspaces; what a caching allocator makes of them, and
    the context of a GPU, come on top.

    Args:
        gpu: whose kernels take memory of their own; None on a CPU, or of one that nobody knows.
        memory_bytes: of the device, where that is known: DeepSpeed's stages 1 and 2 put weights end
            to end on the host where there is no room for them twice.

    Raises:
        UserError: the strategy's library is another version than the one that is followed.
    """
    strategy = strategy_of(resolved.config)
    if unknown := unknown_versions(strategy):
        raise UserError(unknown)
    seen, mesh = _seen(resolved, world_size, device_type, rank)
    buffers = _built(replace(seen, memory_bytes=memory_bytes))
    timeline = buffers.timeline
    if resolved.model.masks:
        buffers.build_masked()
    timeline.period = "first_step"
    timeline.enter("data")
    workspaces = _workspaces_bytes(seen.resolved, gpu)
    for number, size_bytes in enumerate(workspaces):  # once the engine is built: CudaMemory.period
        timeline.allocate(("workspace", number), size_bytes, "temporary")
    trace = _shortened(seen, mesh, 0 if gpu is None else gpu.resident_threads)
    for period in ("first_step", "steady"):
        timeline.period = period
        _step(seen, timeline, buffers, trace)
    # Saving copies a few MiB at a time; resuming fills what a fresh engine already holds.
    for period in ("save", "resume"):
        timeline.period = period
        timeline.enter(period)
    sizes = offload_sizes(resolved.config, resolved.own_model, seen.world_size)
    return Prediction(
        held=timeline.held(),
        first_step=timeline.peak_of("first_step"),
        peak=timeline.peak_of("steady"),
        peaks=timeline.peaks,
        host_bytes=timeline.peaks_elsewhere["host"] + sizes.locked_bytes,
        disk_bytes=sizes.disk_bytes,
        micro_batch_bytes=trace.least_bytes,
        events=timeline.events,
        streams=timeline.streams,
    )


def _workspaces_bytes(resolved: Resolved, gpu: Gpu | None) -> tuple[int, int]:
    """Bytes that cuBLAS keeps for the main thread and for autograd's. With torch 2.11 cuBLASLt,
    which adds biases and multiplies in fp8, has others (pytorch/pytorch#168175)."""
    if gpu is None:
        return 0, 0
    main = backward = gpu.cublas_workspace_bytes
    if torch.__version__.startswith("2.11."):
        shapes = parameter_shapes(resolved.own_model)
        linears = {name.rpartition(".")[0] for name, shape in shapes.items() if len(shape) == 2}
        biased = any(f"{name}.bias" in shapes for name in linears)
        fp8 = resolved.config.optim.arithmetic.fp8_linears
        kept = resolved.model.activation_checkpointing in ("none", "selective")
        recomputes = not kept or resolved.model.mlp_tile is not None
        main += MIB * (biased or fp8)
        backward += MIB * (fp8 or (biased and recomputes))
    return main, backward


def least_bytes(resolved: Resolved, *, world_size: int, device_type: str) -> int:
    """Return what the rank of `predict` has on its device in a later backward at least: parameters,
    the optimizer's states and the inputs of blocks. Quick, since nothing is traced for it."""
    buffers = _built(_seen(resolved, world_size, device_type, None)[0])
    buffers.build_states()
    # Whatever is recomputed, each block's input is kept or as much, but for the first one's, which
    # may need no gradient.
    on_device = resolved.config.model.activation_checkpointing != "offload"
    kept_bytes = on_device * (resolved.own_model.layers - 1) * block_input_bytes(resolved)
    return buffers.timeline.current_bytes + kept_bytes


def block_input_bytes(resolved: Resolved) -> int:
    """Return the bytes of a block's input, of one micro-batch."""
    config = resolved.config
    rows = config.data.micro_batch * resolved.local_seq_len
    rows = local_rows(resolved.model, rows, config.sharding.tensor_parallel)
    element_bytes = strategy_of(config).dtypes(config).computed.itemsize
    return rows * resolved.own_model.d_model * element_bytes


def _built(rank: Rank) -> Buffers:
    timeline = Timeline(rank.device_type)
    buffers = forecast_of(rank.resolved.config).buffers(rank, timeline)
    buffers.build()
    return buffers


def traced(resolved: Resolved, *, world_size: int, device_type: str) -> MicroBatch:
    """The events of one micro-batch of the rank that `predict` calls the worst, without what
    kernels take."""
    seen, mesh = _seen(resolved, world_size, device_type, None)
    return _trace(seen, asked_of(resolved, mesh, device_type=device_type))


def _seen(
    resolved: Resolved, world_size: int, device_type: str, rank: int | None
) -> tuple[Rank, Mesh]:
    """A rank, and its place on the mesh; None as in `predict`."""
    sharding, last = resolved.config.sharding, world_size - 1
    mesh = Mesh.at(last if rank is None else rank, world_size, sharding)
    seen = Rank(
        resolved=resolved,
        world_size=sharding.shard_ranks(world_size),
        rank=(rank or 0) // sharding.tensor_parallel,
        device_type=device_type,
        model_parallel=mesh.model,
    )
    return seen, mesh


def _trace(rank: Rank, asked: dict[str, Any]) -> MicroBatch:
    trace = trace_micro_batch(**asked)
    return on_host(trace) if _leaves_for_host(rank) else trace


def _shortened(rank: Rank, mesh: Mesh, resident_threads: int) -> Shortened:
    """Many choices of a plan have the same."""
    asked = asked_of(
        rank.resolved, mesh, device_type=rank.device_type, resident_threads=resident_threads
    )
    key = (*asked.values(), _leaves_for_host(rank))
    if key not in _SHORTENED:
        trace = _trace(rank, asked)
        _SHORTENED[key] = shortened(trace, whole_blocks=rank.device_type != "cpu")
    return _SHORTENED[key]


_SHORTENED: dict[Hashable, Shortened] = {}


def _leaves_for_host(rank: Rank) -> bool:
    """Return whether blocks' inputs do."""
    offloads = rank.resolved.model.activation_checkpointing == "offload"
    return offloads and rank.device_type == "cuda"


def by_category(ledger: Ledger) -> dict[str, int]:
    """Bytes of tensors on the device."""
    return {name: getattr(ledger.device, f"{name}_bytes") or 0 for name in CATEGORIES}


def _step(rank: Rank, timeline: Timeline, buffers: Buffers, trace: Shortened) -> None:
    """Follow `launcher.train`'s loop and its `train_step` on a timeline."""
    accumulation = rank.resolved.accumulation
    sequences = accumulation * rank.resolved.config.data.micro_batch
    tensors = 3 if rank.resolved.config.data.document_attention else 2
    _read(timeline, sequences, rank.resolved, tensors)
    count = min(accumulation, _FOLLOWED[timeline.period])
    for number in range(1, count + 1):
        compiles = timeline.period == "first_step" and number == 1
        timeline.enter("forward")
        buffers.begin_forward(last=number == count)
        _run(trace.forward, timeline, buffers, compiles)
        buffers.end_forward()
        timeline.enter("backward")
        _run(trace.backward, timeline, buffers, compiles)
        buffers.end_backward()
        _follow(trace.left, timeline, buffers, compiles)
    timeline.enter("step")
    buffers.step()


def _read(timeline: Timeline, sequences: int, resolved: Resolved, tensors: int) -> None:
    timeline.enter("data")
    seq_len, size_bytes = resolved.local_seq_len, INT64 * sequences
    if seq_len == resolved.seq_len:  # parts of sequences are cut out before they are tensors
        timeline.allocate("rows", size_bytes * (seq_len + 1), "temporary")
    timeline.allocate("next batch", tensors * size_bytes * seq_len, "activations")
    timeline.free("rows")
    timeline.free("batch")
    timeline.rename("next batch", "batch", "activations")


def _run(
    segments: Iterable[tuple[Place, list[Seen]]],
    timeline: Timeline,
    buffers: Buffers,
    compiles: bool,
) -> None:
    for place, events in segments:
        buffers.enter(place)
        _follow(events, timeline, buffers, compiles)
        buffers.leave(place)


def _follow(events: Iterable[Seen], timeline: Timeline, buffers: Buffers, compiles: bool) -> None:
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
        elif type(event) is Tuned and compiles:
            allocate("tuning copies", event.copied_bytes, "temporary")
            allocate("tuning", TUNING_BYTES, "temporary")
            free("tuning")
            free("tuning copies")
