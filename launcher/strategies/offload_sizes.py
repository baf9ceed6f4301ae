"""Bytes that offloaded training states take in host memory and on disk. Arithmetic only."""

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.config.schema import RunConfig
from launcher.model.config import ModelConfig
from launcher.optim.choice import OptimChoice
from launcher.optim.dtypes import dtypes
from launcher.optim.registry import OPTIMIZERS
from launcher.strategies.parameters import Parameter, parameters_of
from launcher.strategies.rank import FP32
from launcher.util.json_file import JsonObject
from launcher.util.sizes import page_locked_bytes

# A group of states being updated: master weights, two moments, gradients.
OPTIMIZER_BUFFERS = 4
# The same while the next group is read and the last one is written.
OVERLAPPED_OPTIMIZER_BUFFERS = 12
PARAM_BUFFERS = 5
SWAP_BUFFER_BYTES = 64 * 2**20
"""fp32 states that are updated at a time, unless a DeepSpeed file gives a sub_group_size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadSizes:
    """Bytes of one rank outside of its device.

    `locked_bytes` are the page-locked staging buffers of NVMe offload; they are host memory on
    top of `host_bytes`.
    """

    host_bytes: int
    locked_bytes: int
    disk_bytes: int


def state_bytes(model: ModelConfig, optim: OptimChoice) -> float:
    """Bytes offloaded with the optimizer, per trained parameter: the weights that it updates, and
    its states without counters (all that it keeps for a tensor of no elements)."""
    entry = OPTIMIZERS[optim.optimizer]
    states = sum(
        entry.costs(p.name, p.shape, optim, "cpu").state_bytes
        - entry.costs(p.name, (0,) * len(p.shape), optim, "cpu").state_bytes
        for p in parameters_of(model)
        if p.trained
    )
    return dtypes(optim).stored.itemsize + states / model.trained_parameter_count


def largest_slice_count(model: ModelConfig, world_size: int) -> int:
    """Elements of the largest ZeRO-3 slice: the largest parameter's, the last one padded."""
    return max(-(-p.elements // world_size) for p in parameters_of(model))


def swap_buffer_count(config: RunConfig) -> int:
    """Elements at which DeepSpeed's group of parameters that are updated together is full."""
    return int(_zero_section_of_file(config).get("sub_group_size") or SWAP_BUFFER_BYTES // FP32)


def optimizer_buffer_count(config: RunConfig) -> int:
    """Return the staging buffers for optimizer states that a rank holds, by its DeepSpeed file."""
    # pipeline_read and pipeline_write: a file gives this section nothing else.
    pipeline = _zero_section_of_file(config).get("offload_optimizer", {}).values()
    return OVERLAPPED_OPTIMIZER_BUFFERS if any(pipeline) else OPTIMIZER_BUFFERS


def _zero_section_of_file(config: RunConfig) -> JsonObject:
    from launcher.config.deepspeed_file import passed_on

    section: JsonObject = passed_on(config.sharding.deepspeed).get("zero_optimization", {})
    return section


def _crossing_bytes(
    config: RunConfig, parameters: Sequence[Parameter], world_size: int, element: int
) -> int:
    """Return the bytes of a rank's shards of parameters, or gradients, between host and device.

    For a GPU they are page-locked, and rounded up to powers of two: each of FSDP's shards, or each
    of DeepSpeed's flat groups (matrices, vectors), which frozen ones are not in. NVMe's staging
    buffers are another allocator's.
    """
    if not (config.sharding.pin_memory and config.loop.device == "cuda"):
        packed = sum(p.elements for p in parameters if p.packed)
        others = sum(p.elements for p in parameters) - packed
        return -(-packed // world_size) + element * -(-others // world_size)
    alone = config.sharding.strategy == "fsdp"
    blocks = [
        (1 if p.packed else element, p.elements) for p in parameters if alone or not p.trained
    ]
    if not alone:
        flat = [p for p in parameters if p.trained]
        matrices = sum(p.elements for p in flat if len(p.shape) >= 2)
        vectors = sum(p.elements for p in flat) - matrices
        blocks += [(element, matrices), (element, vectors)]
    return sum(page_locked_bytes(own * -(-count // world_size)) for own, count in blocks)


def offload_sizes(config: RunConfig, model: ModelConfig, world_size: int) -> OffloadSizes:
    """Per rank of the `world_size` with the same shards of matrices, for an even split; zeros where
    nothing is offloaded.

    Beside an offloaded optimizer the accumulated gradients are in host memory too. FSDP's
    offloaded parameters are the master weights themselves, or frozen. Of a fraction of the
    optimizer's states there may be a sub-group more: see `zero/fraction.py`.
    """
    sharding = config.sharding
    if sharding.offload_optimizer == sharding.offload_param == "none":
        return OffloadSizes(host_bytes=0, locked_bytes=0, disk_bytes=0)
    world_size //= sharding.replicate  # each replica has all states
    parameters = parameters_of(model)
    trained = [p for p in parameters if p.trained]
    frozen = [p for p in parameters if not p.trained]
    mine = -(-model.trained_parameter_count // world_size)
    element = dtypes(config.optim).computed.itemsize
    gradient = 2 if sharding.grad_accum_dtype == "bf16" else FP32
    largest = largest_slice_count(model, world_size)
    # Most elements that are updated at a time: a group is closed when it is full.
    group = min(swap_buffer_count(config) + largest, mine)
    states = int(state_bytes(model, config.optim) * mine)
    host = locked = disk = 0
    if sharding.offload_optimizer == "cpu":
        fraction = sharding.offload_fraction
        host += int(fraction * (states + _crossing_bytes(config, trained, world_size, gradient)))
        if sharding.zero != 3:  # whose master weights stay where they are
            # Stages 1 and 2 page-lock the master weights in `states`: what their rounding adds.
            stored = dtypes(config.optim).stored.itemsize
            host += _crossing_bytes(config, trained, world_size, stored) - stored * mine
    elif sharding.offload_optimizer == "nvme":
        host += _crossing_bytes(config, trained, world_size, gradient)
        disk += states
        locked += optimizer_buffer_count(config) * FP32 * group
    if sharding.offload_param == "cpu":
        moved = parameters if sharding.strategy == "zero" else frozen
        host += _crossing_bytes(config, moved, world_size, element)
    elif sharding.offload_param == "nvme":
        disk += element * mine
        # DeepSpeed's buffers for single slices, and one in which it writes a sub-group's together,
        # with room for whole parameters (reserve_partitioned_swap_space in stage3.py).
        locked += element * (PARAM_BUFFERS * largest + world_size * group)
    return OffloadSizes(host_bytes=host, locked_bytes=locked, disk_bytes=disk)
