"""`--offload-fraction`: which of ZeRO-3's sub-groups stay on the device, and how they get there.

DeepSpeed's own `offload_optimizer.ratio` makes a second AdamW, whose first group keeps the learning
rate that it began with, and takes no optimizer but its own beside it. Ours updates tensors wherever
they are, so that it is enough to have a sub-group's master weights, and with them its states and
gradients, elsewhere.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from launcher.model.config import ModelConfig
from launcher.strategies.parameters import parameters_of

SUB_GROUPS = 64
"""So many, where no parameter is larger than that: what is moved is whole sub-groups, and so a
fraction is met within one of them, at the price of as many updates of a smaller tensor each."""


def sub_group_elements(model: ModelConfig, world_size: int) -> int:
    """Return the elements of a rank at which DeepSpeed closes a sub-group."""
    trained = (p for p in parameters_of(model) if p.trained)
    return -(-sum(-(-p.elements // world_size) for p in trained) // SUB_GROUPS)


def kept_on_device(elements: Sequence[int], fraction: float) -> frozenset[int]:
    """Return the sub-groups, of so many elements each, that are not offloaded.

    At least `fraction` of all elements are offloaded. In their order, sub-groups stay that still
    fit into the rest, so that less than the smallest of the offloaded ones is offloaded beyond
    `fraction`.
    """
    room = sum(elements) - math.ceil(fraction * sum(elements))
    kept = set()
    for number, count in enumerate(elements):
        if count <= room:
            kept.add(number)
            room -= count
    return frozenset(kept)


@contextlib.contextmanager
def leaving_on_device(fraction: float, device: torch.device) -> Iterator[None]:
    """Have a stage 3 optimizer that DeepSpeed builds meanwhile keep master weights on `device`,
    all but `fraction` of them. Their fp32 gradients follow while it goes on."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

    original = Stage3._create_fp32_partitions

    def create(outer: Any) -> None:
        original(outer)
        outer.backup_optimizer = outer.optimizer  # steps those that are not on the host
        for number in kept_on_device(outer.fp16_partitioned_groups_flat_numel, fraction):
            outer.subgroup_to_device[number] = device.type
            master = outer.fp32_partitioned_groups_flat[number]
            master.data = master.data.to(device)

    Stage3._create_fp32_partitions = create
    try:
        yield
    finally:
        Stage3._create_fp32_partitions = original


def accumulate_beside_masters(outer: Any, fraction: float) -> None:
    """Have gradients accumulate on the device where their master weights are there: DeepSpeed has
    made one buffer for all of them in host memory, through which each would go."""
    partitions = outer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
    dtype = outer.grad_partitions_flat_buffer.dtype
    sizes = outer.fp16_partitioned_groups_flat_numel
    kept = kept_on_device(sizes, fraction)
    partitions.clear()
    outer.grad_partitions_flat_buffer = None
    if outer.offload_optimizer_pin_memory:
        torch._C._host_emptyCache()  # page-locked memory is kept for later, and nothing else comes
    on_host = torch.zeros(sum(n for i, n in enumerate(sizes) if i not in kept), dtype=dtype)
    if outer.offload_optimizer_pin_memory:
        on_host = on_host.pin_memory()
    outer.grad_partitions_flat_buffer = on_host
    begin = 0
    for number, group in enumerate(outer.fp16_groups):
        if number not in kept:
            flat = on_host.narrow(0, begin, sizes[number])
            begin += sizes[number]
        else:
            # What the optimizer reads, where no conversion lies between.
            gradient = outer.fp32_partitioned_groups_flat[number].grad
            flat = gradient if gradient.dtype == dtype else torch.zeros_like(gradient, dtype=dtype)
        for parameter in group:
            _, offset, elements = outer.grad_position[outer.get_param_id(parameter)]
            partitions[parameter.ds_id] = flat.narrow(0, offset, elements)
