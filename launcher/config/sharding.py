"""The sections of the config that say who holds what, and how what is offloaded is moved."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from launcher.util.flags import MOST_ITEMS, require_positive
from launcher.util.sizes import parse_bytes

Strategy = Literal["single", "ddp", "fsdp", "zero"]
Offload = Literal["none", "cpu", "nvme"]
ContextParallelMethod = Literal["auto", "ulysses", "ring"]
MODEL_PARALLEL: Final = ("context_parallel", "tensor_parallel")
"""Dimensions in which ranks compute one copy of the model together, each by its flag for the number
of its ranks, from the outermost to the innermost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingChoice:
    """Who holds what. ZeRO-3 = FSDP full shard, ZeRO-2 = shard grad op, ZeRO-1 = optimizer only,
    ZeRO-0 = DDP."""

    strategy: Strategy | None = None
    """single, ddp, fsdp or zero (DeepSpeed); not given: ddp on several processes, else single."""
    zero: Literal[0, 1, 2, 3] | None = None
    """ZeRO stage; implies --strategy zero."""
    reshard_after_forward: bool = True
    """FSDP: free gathered parameters after each forward (full shard = ZeRO-3); without it they
    stay until the backward (shard grad op = ZeRO-2)."""
    replicate: int = 1
    """FSDP: shard within groups of ranks/replicate and replicate across them (hybrid)."""
    reduce_each_micro_batch: bool = False
    """FSDP: reduce-scatter after every micro-batch. Keeps accumulated gradients sharded, at the
    price of communicating in each micro-batch rather than once per step."""
    grad_accum_dtype: Literal["fp32", "bf16"] = "fp32"
    """ZeRO in bf16: type in which gradients are accumulated."""
    offload_optimizer: Offload = "none"
    """Where optimizer states live: on the device (none), in host memory (cpu; zero, fsdp) or on a
    disk (nvme; zero 3)."""
    offload_fraction: float = 1.0
    """--offload-optimizer cpu under zero 3: at least this part of the optimizer states and master
    weights is in host memory, by whole parameters; the others stay on the device."""
    offload_param: Offload = "none"
    """Where idle parameters live: on the device (none), in host memory (cpu; zero 3, fsdp) or on
    a disk (nvme; zero 3 in bf16)."""
    context_parallel: int = 1
    """Cut each sequence over this many neighbouring ranks, which together read as many sequences as
    one rank else (long contexts)."""
    context_parallel_method: ContextParallelMethod = "auto"
    """How attention sees whole sequences then: ulysses (each rank gets all tokens of some heads),
    ring (keys and values go around), or auto: ulysses where the ranks divide the heads."""
    tensor_parallel: int = 1
    """Cut each layer's matrices over this many neighbouring ranks, which together compute what one
    rank does else: heads, the MLP's width and the vocabulary (layers that are too wide)."""
    deepspeed: Path | None = None
    """A DeepSpeed JSON file: it sets what no flag (and no --config) sets; "auto" leaves it open."""

    def __post_init__(self) -> None:
        require_positive(self, "replicate", most=MOST_ITEMS)
        require_positive(self, "offload_fraction", most=1)
        require_positive(self, *MODEL_PARALLEL, most=MOST_ITEMS)

    @property
    def model_parallel(self) -> dict[str, int]:
        """Ranks in each dimension of `MODEL_PARALLEL`."""
        return {name: getattr(self, name) for name in MODEL_PARALLEL}

    def data_ranks(self, world_size: int) -> int:
        """Of `world_size` ranks, how many read different sequences; 1 also where they are too few
        for a sequence, which is refused."""
        return max(1, world_size // math.prod(self.model_parallel.values()))

    def shard_ranks(self, world_size: int) -> int:
        """Of `world_size` ranks, how many hold the same shards of matrices, over which states can
        be sharded."""
        return max(1, world_size // self.tensor_parallel)

    def flags_to(self, place: Offload) -> str:
        """The flags that ask for offload to `place`, as one would type them; empty: none does."""
        asked = {
            "--offload-optimizer": self.offload_optimizer,
            "--offload-param": self.offload_param,
        }
        return " ".join(f"{flag} {place}" for flag, value in asked.items() if value == place)


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadChoice:
    """How offloaded states are moved; --offload-optimizer and --offload-param say which are."""

    pin_memory: bool = True
    """Offload from a GPU: page-lock host memory; copies are faster, and it cannot be paged out."""
    nvme_path: Path | None = None
    """Folder on a local NVMe disk for --offload-optimizer nvme and --offload-param nvme; swap
    files go into folders of their own there, which are removed at the end."""
    nvme_buffer: str = "64MiB"
    """NVMe: optimizer states updated at a time; each rank page-locks several such buffers."""

    def __post_init__(self) -> None:
        parse_bytes(self.nvme_buffer, "--nvme-buffer")
