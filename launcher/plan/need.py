"""What a run needs of the memory there is: predicted tensors, and what surrounds them."""

from dataclasses import dataclass
from typing import Final

from launcher.config.resolve import Resolved
from launcher.measure.hardware import CONTEXT_BYTES, MIB, NCCL_GROUP_BYTES, find_gpu
from launcher.memory.allocator import replay
from launcher.plan.calibration import Calibration
from launcher.plan.predict import predict
from launcher.strategies import strategy_of

# On a CPU --memory-limit counts private memory (VmData) that grows after the session has begun.
# Measured, less the predicted live tensors, in short runs of every strategy (predictions of 17 to
# 320 MiB): 8 to 12 MiB in fp32; 22 MiB more for the thread that writes TensorBoard's files, 85 to
# 89 MiB more where DeepSpeed is imported, 12 to 22 MiB more where oneDNN multiplies in bf16.
LATE_BYTES: Final = 12 * MIB
TENSORBOARD_BYTES: Final = 22 * MIB
LOW_PRECISION_BYTES: Final = 20 * MIB
SLACK: Final = 0.02
"""Of the tensors, for page rounding and what a prediction misses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The memory that each rank has."""

    size_bytes: int
    gpu: str | None
    """What CUDA calls it; None on a CPU."""
    capped: bool
    """By --memory-limit, which on a GPU is one of the allocator: context and NCCL lie outside."""

    @property
    def device_type(self) -> str:
        """`cuda` or `cpu`."""
        return "cpu" if self.gpu is None else "cuda"


def needed_bytes(resolved: Resolved, room: Room, *, world_size: int) -> int:
    """Of `room`, at the highest moment of the run; more than there is where that is not enough."""
    prediction = predict(resolved, world_size=world_size, device_type=room.device_type)
    live = prediction.peak_bytes
    if room.gpu is None:
        # What is offloaded is in the same memory.
        tensors = live + prediction.host_bytes
        return int((1 + SLACK) * tensors) + _around_bytes(resolved)
    gpu = find_gpu(room.gpu)
    workspace = 0 if gpu is None else gpu.cublas_workspace_bytes
    around = 0 if room.capped else outside_bytes(room.gpu, grouped=world_size > 1)
    if live + workspace + around > room.size_bytes:
        return live + workspace + around
    use = replay([(-1, workspace), *prediction.events], limit_bytes=room.size_bytes - around)
    return room.size_bytes + 1 if use.out_of_memory else use.peak_reserved_bytes + around


def _around_bytes(resolved: Resolved) -> int:
    """Private memory that is not tensors, on a CPU."""
    config = resolved.config
    tensorboard = TENSORBOARD_BYTES if "tensorboard" in config.measure.boards else 0
    library = strategy_of(config).imports_bytes
    low_precision = 0 if config.optim.precision == "fp32" else LOW_PRECISION_BYTES
    return LATE_BYTES + tensorboard + library + low_precision


def outside_bytes(gpu: str, *, grouped: bool) -> int:
    """What a process takes of a GPU outside the allocator: as learnt here, or as published."""
    known = find_gpu(gpu)
    name = gpu if known is None else known.name
    learnt = Calibration.load().fixed_bytes(name, grouped=grouped)
    if learnt is not None:
        return learnt
    return CONTEXT_BYTES + (NCCL_GROUP_BYTES if grouped else 0)
