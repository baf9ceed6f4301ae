"""The bytes of one rank of a run, without a GPU, a process group or the model's memory."""

from dataclasses import dataclass, field

import torch

from launcher.config.resolve import Resolved
from launcher.errors import UserError
from launcher.memory.ledger import Ledger
from launcher.memory.offloaded_activations import on_host
from launcher.memory.timeline import LargeTensor, Tag, Timeline
from launcher.memory.trace import trace_micro_batch
from launcher.memory.trace_events import Born, Compute, Freed, Gradient, MicroBatch, Module, Segment
from launcher.optim.registry import checkpointed
from launcher.strategies import strategy_of
from launcher.strategies.base import unknown_versions
from launcher.strategies.buffers import Buffers
from launcher.strategies.offload_sizes import offload_sizes
from launcher.strategies.rank import FP32, Rank

INT64 = 8
# Micro-batches that are followed: the first, the last and, in a first step, one between, in which
# DDP's buckets are not yet rebuilt and ZeRO-3 fetches ahead for the first time. Others repeat them.
_FOLLOWED = {"first_step": 3, "steady": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One rank's bytes, in the records that the measuring side writes."""

    held: Ledger
    """States between two steps."""
    first_step: Ledger
    """At the highest moment of the first step, in which optimizer states are born."""
    peak: Ledger
    """At the highest moment of any later step."""
    peaks: dict[tuple[str, str], int]
    """(period, phase) -> highest bytes on the device; periods init, first_step, steady, save,
    resume."""
    largest: tuple[LargeTensor, ...]
    """The biggest tensors at `peak`."""
    host_bytes: int
    """Host memory that offload needs at most, for this rank: states and staging buffers."""
    disk_bytes: int
    """Bytes on disk that offload needs, for this rank."""
    save_host_bytes: int
    """Host memory that a save on a GPU stages this rank's share of the checkpoint in."""
    events: list[tuple[int, int]] = field(repr=False)
    """(storage, bytes) in program order, 0 bytes = freed: what an allocator is asked for."""

    @property
    def peak_bytes(self) -> int:
        """Highest bytes on the device in the whole run."""
        return max(self.peaks.values())


def predict(resolved: Resolved, *, world_size: int, device_type: str, rank: int = 0) -> Prediction:
    """Follow two steps of a resolved run, as rank `rank` of `world_size`.

    The bytes are those of live tensors; what a caching allocator makes of them, and the context
    of a GPU, come on top.

    Raises:
        UserError: the strategy's library is another version than the one that is followed.
    """
    strategy = strategy_of(resolved.config)
    if unknown := unknown_versions(strategy):
        raise UserError(unknown)
    seen = Rank(resolved=resolved, world_size=world_size, rank=rank, device_type=device_type)
    timeline = Timeline(device_type)
    buffers = strategy.memory(seen, timeline)
    buffers.build()
    trace = trace_micro_batch(
        resolved.model,
        _compute(seen),
        micro_batch=resolved.config.data.micro_batch,
        seq_len=resolved.seq_len,
    )
    if resolved.model.activation_checkpointing == "offload" and device_type == "cuda":
        trace = on_host(trace)
    loop = _Loop(seen, timeline, buffers, trace)
    for period in ("first_step", "steady"):
        timeline.period = period
        loop.step()
    # Saving copies a few MiB at a time; resuming fills what a fresh engine already holds.
    for period in ("save", "resume"):
        timeline.period = period
        timeline.enter(period)
    sizes = offload_sizes(resolved.config, resolved.model, world_size)
    first, _ = timeline.peak_of("first_step")
    peak, largest = timeline.peak_of("steady")
    return Prediction(
        held=timeline.held("predicted"),
        first_step=first,
        peak=peak,
        peaks=timeline.peaks,
        largest=largest,
        host_bytes=timeline.peaks_elsewhere["host"] + sizes.locked_bytes,
        disk_bytes=sizes.disk_bytes,
        save_host_bytes=_staged_bytes(seen) if device_type == "cuda" else 0,
        events=timeline.events,
    )


def _compute(rank: Rank) -> Compute:
    """In which types the model computes."""
    config, low = rank.resolved.config, rank.types.computed.itemsize == 2
    strategy = strategy_of(config)
    in_low = low and (strategy.casts_parameters(config.sharding) or rank.stored_bytes == 2)
    return Compute(
        params_dtype=torch.bfloat16 if in_low else torch.float32,
        autocast=low and not in_low,
        stage3=strategy.variant(config.sharding).fetches_by_module,
    )


def _staged_bytes(rank: Rank) -> int:
    """Parameters and optimizer states in fp32; copies of one range share the writing of it."""
    states, _ = checkpointed(rank.resolved.config.optim)
    share = -(-rank.resolved.model.parameter_count // rank.world_size)
    return FP32 * (1 + len(states)) * share


class _Loop:
    """The training loop of `launcher.train`, on a timeline."""

    def __init__(self, rank: Rank, timeline: Timeline, buffers: Buffers, trace: MicroBatch) -> None:
        self._timeline = timeline
        self._buffers = buffers
        self._trace = trace
        self._accumulation = rank.resolved.accumulation
        self._sequences = self._accumulation * rank.resolved.config.data.micro_batch
        self._seq_len = rank.resolved.seq_len

    def step(self) -> None:
        self._read()
        count = min(self._accumulation, _FOLLOWED[self._timeline.period])
        for number in range(1, count + 1):
            self._timeline.enter("forward")
            self._buffers.begin_forward(last=number == count)
            self._run(self._trace.forward)
            self._buffers.end_forward()
            for key in self._trace.left:  # the loss before is forgotten only now
                self._timeline.free(("before", key))
            self._timeline.enter("backward")
            self._run(self._trace.backward)
            self._buffers.end_backward()
            for key in self._trace.left:
                self._timeline.rename(key, ("before", key), "temporary")
        self._timeline.enter("step")
        self._buffers.step()

    def _read(self) -> None:
        self._timeline.enter("data")
        rows = Tag("temporary", "data", (self._sequences, self._seq_len + 1), "int64")
        batch = Tag("activations", "data", (2, self._sequences, self._seq_len), "int64")
        self._timeline.allocate("rows", INT64 * self._sequences * (self._seq_len + 1), rows)
        size_bytes = 2 * INT64 * self._sequences * self._seq_len
        self._timeline.allocate("next batch", size_bytes, batch)
        self._timeline.free("rows")
        self._timeline.free("batch")
        self._timeline.rename("next batch", "batch", "activations")

    def _run(self, segments: list[Segment]) -> None:
        buffers = self._buffers
        allocate, free = self._timeline.allocate, self._timeline.free
        for place, events in segments:
            buffers.enter(place)
            for event in events:
                # The innermost loop of a plan: bound methods, and no isinstance.
                if type(event) is Born:
                    allocate(event.key, event.size_bytes, event.tag, where=event.where)
                elif type(event) is Freed:
                    free(event.key)
                elif type(event) is Gradient:
                    buffers.gradient(event.key, event.parameter)
                elif type(event) is Module:
                    buffers.module(event)
            buffers.leave(place)
