"""Section of the config about sharding and offload."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from launcher.util.flags import MOST_ITEMS, require_positive

Strategy = Literal["single", "ddp", "fsdp", "zero"]
Offload = Literal["none", "cpu", "nvme"]
ContextParallelMethod = Literal["auto", "ulysses", "ring"]
MODEL_PARALLEL: Final = ("context_parallel", "tensor_parallel")
"""Dimensions in which ranks compute one copy of the model together, each by its flag for the number
of its ranks, from the outermost to the innermost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingChoice:
    """Sharding of states over ranks. ZeRO-3 = FSDP full shard, ZeRO-2 = shard grad op, ZeRO-1 =
    optimizer only, ZeRO-0 = DDP."""

    strategy: Strategy | None = None
    """single, ddp, fsdp or zero (DeepSpeed). When not given: ddp on several processes, else
    single."""
    zero: Literal[0, 1, 2, 3] | None = None
    """ZeRO stage; implies --strategy zero."""
    reshard_after_forward: bool = True
    """FSDP: free gathered parameters after each forward (full shard = ZeRO-3). Otherwise they stay
    until the backward (shard grad op = ZeRO-2)."""
    replicate: int = 1
    """FSDP: shard within groups of ranks/replicate and replicate across them (hybrid)."""
    reduce_each_micro_batch: bool = False
    """FSDP: reduce-scatter after every micro-batch. Accumulated gradients stay sharded; each
    micro-batch communicates, rather than each step."""
    grad_accum_dtype: Literal["fp32", "bf16"] = "fp32"
    """ZeRO in bf16: type in which gradients are accumulated."""
    offload_optimizer: Offload = "none"
    """Location of optimizer states: the device (none), host memory (cpu; zero, fsdp) or a disk
    (nvme; zero 3)."""
    offload_fraction: float = 1.0
    """--offload-optimizer cpu under zero 3: offload at least this fraction of the optimizer states
    and master weights, by whole parameters; the others stay on the device."""
    offload_param: Offload = "none"
    """Location of idle parameters: the device (none), host memory (cpu; zero 3, fsdp) or a disk
    (nvme; zero 3 in bf16)."""
    pin_memory: bool = True
    """Page-lock the host memory of offloaded states: faster copies, but no paging (GPUs)."""
    nvme_path: Path | None = None
    """Folder on a local NVMe disk for nvme offload. Swap files are removed at the end."""
    context_parallel: int = 1
    """Context-parallel degree: shard each sequence over this many ranks (long contexts)."""
    context_parallel_method: ContextParallelMethod = "auto"
    """Attention over sharded sequences: ulysses (each rank gets all tokens of some heads), ring
    (K/V blocks circulate), or auto: ulysses if the ranks divide the heads."""
    tensor_parallel: int = 1
    """Tensor-parallel degree: shard heads, the MLP's width and the vocabulary over this many ranks
    (wide layers)."""
    deepspeed: Path | None = None
    """DeepSpeed JSON file. Flags and --config win; "auto" leaves a value open."""

    def __post_init__(self) -> None:
        require_positive(self, "replicate", most=MOST_ITEMS)
        require_positive(self, "offload_fraction", most=1)
        require_positive(self, *MODEL_PARALLEL, most=MOST_ITEMS)

    @property
    def model_parallel(self) -> dict[str, int]:
        """Ranks in each dimension of `MODEL_PARALLEL`."""
        return {name: getattr(self, name) for name in MODEL_PARALLEL}

    def data_ranks(self, world_size: int) -> int:
        """Return how many of `world_size` ranks read different sequences, at least 1: too few ranks
        for one sequence are refused elsewhere."""
        return max(1, world_size // math.prod(self.model_parallel.values()))

    def shard_ranks(self, world_size: int) -> int:
        """Return how many of `world_size` ranks hold the same shards of matrices, over which states
        can be sharded."""
        return max(1, world_size // self.tensor_parallel)

    def flags_to(self, place: Offload) -> str:
        """Return the flags that request offload to `place`, as typed; empty if none does."""
        asked = {
            "--offload-optimizer": self.offload_optimizer,
            "--offload-param": self.offload_param,
        }
        return " ".join(f"{flag} {place}" for flag, value in asked.items() if value == place)
