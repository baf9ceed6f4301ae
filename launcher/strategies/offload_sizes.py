"""Bytes that offloaded training states take in host memory and on disk. Arithmetic only."""

from dataclasses import dataclass

from launcher.config.offload import OffloadChoice
from launcher.config.schema import RunConfig
from launcher.model.config import ModelConfig
from launcher.sizes import parse_bytes

FP32_BYTES = 4
ADAM_STATE_BYTES = 12  # fp32 master weight and two moments, per parameter

# What DeepSpeed refuses to swap: a smaller range of states stays in host memory.
LEAST_SWAPPED_BYTES = 2**20
# A group of states being updated: master weights, two moments, gradients.
OPTIMIZER_BUFFERS = 4
# The same while the next group is read and the last one is written.
OVERLAPPED_OPTIMIZER_BUFFERS = 11
PARAM_BUFFERS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadSizes:
    """What one rank keeps elsewhere than on its device.

    `locked_bytes` are the page-locked staging buffers of NVMe offload; they are host memory on
    top of `host_bytes`.
    """

    host_bytes: int
    locked_bytes: int
    disk_bytes: int


def largest_parameter_count(model: ModelConfig) -> int:
    """Elements of the model's largest parameter."""
    widest = max(model.vocab_size, model.context, 3 * model.d_model, model.ffn_dim)
    return widest * model.d_model


def largest_slice_count(model: ModelConfig, world_size: int) -> int:
    """Elements of the largest ZeRO-3 slice: the largest parameter's, the last one padded."""
    return -(-largest_parameter_count(model) // world_size)


def swap_buffer_count(offload: OffloadChoice) -> int:
    """Elements at which DeepSpeed's group of parameters that are updated together is full."""
    return parse_bytes(offload.nvme_buffer, "--nvme-buffer") // FP32_BYTES


def swap_group_count(model: ModelConfig, offload: OffloadChoice, world_size: int) -> int:
    """Most elements that are updated at a time: a group is closed when it is full."""
    full = swap_buffer_count(offload)
    everything = -(-model.parameter_count // world_size)
    return min(full + largest_slice_count(model, world_size), everything)


def optimizer_buffer_count(offload: OffloadChoice) -> int:
    """Staging buffers for optimizer states that a rank holds."""
    return OVERLAPPED_OPTIMIZER_BUFFERS if offload.nvme_overlap else OPTIMIZER_BUFFERS


def offload_sizes(config: RunConfig, model: ModelConfig, world_size: int) -> OffloadSizes:
    """Per rank, for an even split; zeros where nothing is offloaded.

    Beside an offloaded optimizer the accumulated gradients are in host memory too. FSDP's
    offloaded parameters are the master weights themselves.
    """
    sharding, offload = config.sharding, config.offload
    mine = -(-model.parameter_count // world_size)
    element = FP32_BYTES if config.optim.precision == "fp32" else 2
    gradient = 2 if sharding.grad_accum_dtype == "bf16" else FP32_BYTES
    group = swap_group_count(model, offload, world_size)
    host = locked = disk = 0
    if sharding.offload_optimizer == "cpu":
        host += (ADAM_STATE_BYTES + gradient) * mine
    elif sharding.offload_optimizer == "nvme":
        host += gradient * mine
        disk += ADAM_STATE_BYTES * mine
        locked += optimizer_buffer_count(offload) * FP32_BYTES * group
    if sharding.offload_param == "cpu" and sharding.strategy == "zero":
        host += element * mine
    elif sharding.offload_param == "nvme":
        disk += element * mine
        locked += PARAM_BUFFERS * element * largest_slice_count(model, world_size)
        locked += element * group
    return OffloadSizes(host_bytes=host, locked_bytes=locked, disk_bytes=disk)
