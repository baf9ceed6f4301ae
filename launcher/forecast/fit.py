"""Judge if a run fits: predicted tensors, and the memory around them, against the memory."""

import dataclasses
from dataclasses import dataclass
from typing import Final, Literal

from launcher.config.resolve import Resolved
from launcher.forecast.allocator import AllocatorUse, replay
from launcher.forecast.calibration import Calibration
from launcher.forecast.predict import Prediction, block_input_bytes, predict
from launcher.measure.hardware import CONTEXT_BYTES, NCCL_GROUP_BYTES, find_gpu
from launcher.strategies import strategy_of
from launcher.util.sizes import MIB

# On a CPU --memory-limit counts private memory (VmData) that grows after the session has begun.
# Measured, less the predicted live tensors, in short runs of every strategy (predictions of 17 to
# 320 MiB): 8 to 12 MiB in fp32; 22 MiB more for the thread that writes TensorBoard's files, 85 to
# 89 MiB more where DeepSpeed is imported, 12 to 22 MiB more where oneDNN multiplies in bf16.
LATE_BYTES: Final = 12 * MIB
TENSORBOARD_BYTES: Final = 22 * MIB
LOW_PRECISION_BYTES: Final = 20 * MIB
# On a GPU kernels take memory for a moment that no trace sees, as attention's backward for queries'
# gradients in fp32: 8 MiB where it was seen to decide (bench/allocator.py).
STAGING_BYTES: Final = 16 * MIB
GRADIENT_BYTES: Final = 4
"""Bytes of a parameter's gradient, at most."""
SLACK: Final = 0.02
"""Share of the tensors, for page rounding and what a prediction misses."""

TIGHT_FROM: Final = 0.95
"""Share of the memory above which a prediction error of a few percent may run out of memory."""

Verdict = Literal["fits", "tight", "does not fit"]


def verdict(used_bytes: int, memory_bytes: int) -> Verdict:
    """Compare used bytes with the memory there is."""
    share = used_bytes / memory_bytes
    return "does not fit" if share > 1 else "tight" if share > TIGHT_FROM else "fits"


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The memory that each rank has."""

    size_bytes: int
    gpu: str | None
    """Its name in CUDA; None on a CPU."""
    capped: bool
    """Limited by --memory-limit; on a GPU that limits the allocator, without context and NCCL."""

    @property
    def device_type(self) -> str:
        """`cuda` or `cpu`."""
        return "cpu" if self.gpu is None else "cuda"


def needed_bytes(resolved: Resolved, room: Room) -> int:
    """Peak bytes of a run, of those in `room`; more than `room` has where it does not fit."""
    prediction = predict(
        resolved,
        gpu=find_gpu(room.gpu),
        # The device's free memory, which DeepSpeed asks for, ignores a limit of the allocator.
        memory_bytes=None if room.capped else room.size_bytes,
    )
    if room.gpu is None:
        # Offloaded states are in the same memory.
        tensors = prediction.peak_bytes + prediction.host_bytes
        return int((1 + SLACK) * tensors) + _around_bytes(resolved)
    around = STAGING_BYTES
    if not room.capped:
        around += outside_bytes(
            room.gpu, grouped=resolved.world_size > 1, learnt=Calibration.load()
        )
    limit_bytes = room.size_bytes - around
    # live tensors alone are too large: the replay, which takes as long again, could only confirm it
    if prediction.peak_bytes > limit_bytes:
        return around + prediction.peak_bytes
    use = reserved(prediction, resolved, limit_bytes=limit_bytes)
    return around + within(use, limit_bytes)


def reserved(prediction: Prediction, run: Resolved, *, limit_bytes: int | None) -> AllocatorUse:
    """Replay a run through a model of CUDA's caching allocator, on the rank that reserves most."""
    ranks = [prediction] if prediction.other is None else [prediction, prediction.other]
    uses = [
        replay(
            rank.events,
            rank.streams,
            limit_bytes=limit_bytes,
            expandable_segments=run.expandable_segments,
        )
        for rank in ranks
    ]
    use = max(uses, key=lambda use: (use.out_of_memory, use.peak_reserved_bytes))
    if run.model.activation_checkpointing == "offload":
        # The host is ahead of the copies, and memory that a copy's stream has used is free only
        # after it: at most all blocks' inputs, on their way out and on their way back. torch waits
        # for copies before it runs out of memory.
        delayed = use.peak_reserved_bytes + 2 * run.own_model.layers * block_input_bytes(run)
        peak_bytes = delayed if limit_bytes is None else min(delayed, limit_bytes)
        peak_bytes = max(peak_bytes, use.peak_reserved_bytes)
        return dataclasses.replace(use, peak_reserved_bytes=peak_bytes)
    if not run.config.loop.cuda_graphs:
        return use
    # A recording keeps its gradients, in memory of its own. Taken for all of them.
    peak_bytes = use.peak_reserved_bytes + GRADIENT_BYTES * run.model.parameter_count
    out = use.out_of_memory or (limit_bytes is not None and peak_bytes > limit_bytes)
    return dataclasses.replace(use, peak_reserved_bytes=peak_bytes, out_of_memory=out)


def within(use: AllocatorUse, limit_bytes: int) -> int:
    """Peak reserved bytes; more than the limit after out of memory."""
    return limit_bytes + 1 if use.out_of_memory else use.peak_reserved_bytes


def _around_bytes(resolved: Resolved) -> int:
    """Private memory of a process on a CPU beside its tensors."""
    config = resolved.config
    tensorboard = TENSORBOARD_BYTES if "tensorboard" in config.measure.loggers else 0
    library = strategy_of(config).imports_bytes
    low_precision = 0 if config.optim.arithmetic.computed == "fp32" else LOW_PRECISION_BYTES
    return LATE_BYTES + tensorboard + library + low_precision


def outside_bytes(gpu: str, *, grouped: bool, learnt: Calibration | None) -> int:
    """Memory of a GPU that a process takes outside the allocator, as learnt here or published."""
    here = learnt and learnt.fixed_bytes(gpu, grouped=grouped)
    return here or CONTEXT_BYTES + (NCCL_GROUP_BYTES if grouped else 0)
