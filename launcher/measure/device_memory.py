"""The memory headlines of one rank, never mixed up: allocated, reserved, and what is in use."""

import resource
from dataclasses import dataclass
from functools import cache

import psutil
import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReading:
    """Bytes since the last reset. On a CPU only `used_bytes` (resident set) is known."""

    reserved_peak_bytes: int | None
    used_bytes: int | None
    capacity_bytes: int | None


def read_memory(device: torch.device) -> MemoryReading:
    """Peaks of this process's allocator, and what the whole device (or process) uses now."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return MemoryReading(
            reserved_peak_bytes=torch.cuda.max_memory_reserved(device),
            used_bytes=total - free,
            capacity_bytes=total,
        )
    return MemoryReading(
        reserved_peak_bytes=None,
        used_bytes=_process().memory_info().rss,
        capacity_bytes=psutil.virtual_memory().total,
    )


def peak_rss_bytes() -> int:
    """Highest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@cache
def _process() -> psutil.Process:
    return psutil.Process()
