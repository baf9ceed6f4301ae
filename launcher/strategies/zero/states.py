"""Where DeepSpeed keeps its training state. The only file that knows its attribute names."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from launcher.memory.storages import StorageCount
from launcher.strategies.zero.swap import count_swapped

MASTER_WEIGHTS = (
    "single_partition_of_fp32_groups",  # stages 1, 2
    "fp32_partitioned_groups_flat",  # stage 3
    "fp32_groups_flat_partition",  # stage 1 with fp32 accumulation
)
GRADIENTS = (
    "averaged_gradients",
    "grad_partitions_flat_buffer",
    "all_grad_tensors",
    "fp32_groups_gradients_flat",
    "accumulated_grads_in_cpu",
    "temp_grad_buffer_for_cpu_offload",
    "temp_grad_gpu_buffer",
    "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",
)
PARAMETERS = ("bit16_groups_flat", "fp16_partitioned_groups_flat", "lp_param_buffer")


def count_states(engine: Any, count: StorageCount) -> None:
    """Add everything a DeepSpeed engine holds between two steps to `count`."""
    outer = engine.optimizer
    inner = getattr(outer, "optimizer", outer)
    parameters = list(engine.module.parameters())
    count_swapped(engine, count)  # first: states that were swapped out may still name its buffers
    count.add("optimizer", _tensors(list(inner.state.values())))
    for name in MASTER_WEIGHTS:
        count.add("master", _tensors(getattr(outer, name, None)))
    for parameter in parameters:
        mapping = getattr(parameter, "_hp_mapping", None)
        count.add("master", _tensors(getattr(mapping, "hp_fragment", None)))
    for name in GRADIENTS:
        count.add("grads", _tensors(getattr(outer, name, None)))
    for parameter in parameters:
        count.add("grads", [parameter.grad, getattr(parameter, "grad_accum", None)])
    for group in inner.param_groups:
        count.add("grads", [p.grad for p in group["params"]])
    for name in MASTER_WEIGHTS:
        masters = _tensors(getattr(outer, name, None))
        count.add("grads", [m.grad for m in masters])
    for bucket in (getattr(outer, "ipg_buckets", None) or {}).values():
        count.add("buffers", _tensors(getattr(bucket, "buffer", None)))
    for name in PARAMETERS:
        count.add("params", _tensors(getattr(outer, name, None)))
    count.add("params", [getattr(p, "ds_tensor", None) for p in parameters])
    count.add("params", [p.data for p in parameters])


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _tensors(item)
