"""The bytes of one rank of a run, without a GPU, a process group or the model's memory."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from launcher.config.resolve import Resolved
from launcher.forecast.buffers import Buffers
from launcher.forecast.followed import follow_step
from launcher.forecast.strategies import forecast_of
from launcher.forecast.timeline import Timeline
from launcher.forecast.trace.asked import asked_of
from launcher.forecast.trace.blocks import on_host, trace_micro_batch
from launcher.forecast.trace.events import MicroBatch, TraceRequest
from launcher.forecast.trace.shortened import Shortened, shortened
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
    other: "Prediction | None" = field(default=None, repr=False)
    """Another rank with a lower peak, whose allocator may reserve more."""

    @property
    def peak_bytes(self) -> int:
        """Highest bytes on the device in the whole run."""
        return max(self.peaks.values())


def predict(
    resolved: Resolved,
    *,
    rank: int | None = None,
    gpu: Gpu | None = None,
    memory_bytes: int | None = None,
) -> Prediction:
    """Follow two steps of a resolved run, as rank `rank`; None for the worst: the shards of the
    first one, or of the last one where those need more, and, where sequences are cut, the part of
    the last one.

    The bytes are those of live tensors and workspaces; what a caching allocator makes of them, and
    the context of a GPU, come on top.

    Args:
        gpu: whose kernels take memory of their own; None on a CPU, or of an unknown one.
        memory_bytes: of the device, where that is known: DeepSpeed's stages 1 and 2 put weights end
            to end on the host where there is no room for them twice.

    Raises:
        UserError: the strategy's library is another version than the one that is followed.
    """
    strategy = strategy_of(resolved.config)
    if unknown := unknown_versions(strategy):
        raise UserError(unknown)

    def followed(rank: int | None) -> tuple[Prediction, Buffers]:
        seen, mesh = _seen(resolved, rank)
        buffers = _built(replace(seen, memory_bytes=memory_bytes))
        return _followed(seen, mesh, buffers, gpu), buffers

    found, buffers = followed(rank)
    if rank is None and buffers.last_may_need_more:
        last, _ = followed(resolved.world_size - 1)
        last_is_worse = last.peak_bytes > found.peak_bytes
        found = replace(last, other=found) if last_is_worse else replace(found, other=last)
    return found


def _followed(seen: Rank, mesh: Mesh, buffers: Buffers, gpu: Gpu | None) -> Prediction:
    resolved, timeline = seen.resolved, buffers.timeline
    if resolved.model.masks:
        buffers.build_masked()
    timeline.period = "first_step"
    timeline.enter("data")
    # once the engine is built: CudaMemory.period
    for number, size_bytes in enumerate(_workspaces(resolved, gpu)):
        timeline.allocate(("workspace", number), size_bytes, "temporary")
    if gpu is not None and not _frees_workspaces():
        buffers.cublas_workspace_bytes = gpu.cublas_workspace_bytes
    trace = _shortened(seen, mesh, gpu)
    for period in ("first_step", "steady"):
        timeline.period = period
        follow_step(seen, timeline, buffers, trace, gpu)
    # Saving copies a few MiB at a time; resuming fills what a fresh engine already holds.
    for period in ("save", "resume"):
        timeline.period = period
        # no allocation follows: the level between steps is the phase's peak
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


def _workspaces(resolved: Resolved, gpu: Gpu | None) -> list[int]:
    """Return bytes that cuBLAS keeps for the main thread, and for autograd's. With torch 2.11
    cuBLASLt, which adds biases and multiplies in fp8, has others (pytorch/pytorch#168175); with
    2.15 each product has one for as long as it takes, so that one is held at a peak in a product.
    """
    if gpu is None:
        return []
    main = backward = gpu.cublas_workspace_bytes
    if _frees_workspaces():
        return [main]
    if torch.__version__.startswith("2.11."):
        shapes = parameter_shapes(resolved.own_model)
        linears = {name.rpartition(".")[0] for name, shape in shapes.items() if len(shape) == 2}
        biased = any(f"{name}.bias" in shapes for name in linears)
        fp8 = resolved.config.optim.arithmetic.fp8_linears
        kept = resolved.model.activation_checkpointing in ("none", "selective")
        recomputes = not kept or resolved.model.mlp_tile is not None
        main += MIB * (biased or fp8)
        backward += MIB * (fp8 or (biased and recomputes))
    return [main, backward]


def _frees_workspaces() -> bool:
    return torch.__version__.startswith("2.15.")


def least_bytes(resolved: Resolved) -> int:
    """Return what the rank of `predict` has on its device in a later backward at least: parameters,
    the optimizer's states and the inputs of blocks. Quick, since nothing is traced for it."""
    buffers = _built(_seen(resolved, None)[0])
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


def traced(resolved: Resolved) -> MicroBatch:
    """The events of one micro-batch of the rank that `predict` calls the worst, without what
    kernels take."""
    seen, mesh = _seen(resolved, None)
    return _trace(seen, asked_of(resolved, mesh, device_type=resolved.device_type))


def _seen(resolved: Resolved, rank: int | None) -> tuple[Rank, Mesh]:
    """A rank, and its place on the mesh; None as in `predict`."""
    sharding, ranks = resolved.config.sharding, resolved.world_size
    mesh = Mesh.at(ranks - 1 if rank is None else rank, ranks, sharding)
    seen = Rank(
        resolved=resolved,
        world_size=sharding.shard_ranks(ranks),
        # tensor-parallel ranks are adjacent, and have the same shards of their own matrices
        rank=(rank or 0) // sharding.tensor_parallel,
        device_type=resolved.device_type,
        model_parallel=mesh.model,
    )
    return seen, mesh


def _trace(rank: Rank, asked: TraceRequest) -> MicroBatch:
    trace = trace_micro_batch(asked)
    return on_host(trace) if _leaves_for_host(rank) else trace


def _shortened(rank: Rank, mesh: Mesh, gpu: Gpu | None) -> Shortened:
    """Many choices of a plan have the same."""
    asked = asked_of(rank.resolved, mesh, device_type=rank.device_type, gpu=gpu)
    key = (asked, _leaves_for_host(rank))
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
