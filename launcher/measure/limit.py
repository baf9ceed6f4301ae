"""`--memory-limit`: emulate a device with less memory; detection of out-of-memory errors."""

import contextlib
import ctypes
import re
import resource
from pathlib import Path

import torch

from launcher.util.errors import UserError
from launcher.util.sizes import UNITS, gib, parse_bytes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGE_BYTES = 128 * 2**10  # glibc's threshold at the start of a process


def limit_memory(limit: str, device: torch.device) -> None:
    """Limit the memory of this process to `limit` (the flag's text) beyond what it has now.

    On a GPU this caps the caching allocator; on a CPU the kernel limits private memory
    (RLIMIT_DATA) to the current size plus the limit.

    Raises:
        UserError: the limit exceeds the GPU's memory, or the hard RLIMIT_DATA.
    """
    limit_bytes = parse_bytes(limit, "--memory-limit")
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        if limit_bytes > total:
            raise UserError(
                f"--memory-limit {gib(limit_bytes)} is more than the GPU's {gib(total)}: give less"
            )
        torch.cuda.set_per_process_memory_fraction(limit_bytes / total, device)
        return
    _map_large_blocks()
    status = Path("/proc/self/status").read_text()
    match = re.search(r"VmData:\s+(\d+) kB", status)
    assert match, "RLIMIT_DATA exists where /proc does"
    used_bytes = int(match[1]) * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY and used_bytes + limit_bytes > hard:
        raise UserError(
            f"--memory-limit {gib(limit_bytes)} is more than the {gib(max(0, hard - used_bytes))} "
            "that this process may still take (ulimit -Hd): give less"
        )
    resource.setrlimit(resource.RLIMIT_DATA, (used_bytes + limit_bytes, hard))


def _map_large_blocks() -> None:
    # Have glibc map every large block by itself and return it when freed. By default it raises the
    # threshold with every large block that is freed, so that later ones, up to 32 MiB, come from a
    # heap that fragments: a run would need up to 1.5 times its tensors, and vary. With a fixed
    # threshold, at the price of fresh pages, live tensors and private memory differ by some 16 MiB.
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no mallopt
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, LARGE_BYTES)


def lift_limit(device: torch.device) -> None:
    """Remove the CPU limit, so that a failure can be reported."""
    if device.type == "cpu":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _is_limited() -> bool:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    return soft != hard


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the device or the host ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    # oneDNN gives no reason; an unsupported operation fails at the primitive *descriptor*.
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in text
        or "not enough memory" in text
        # torch asserts when NVML fails while it collects other processes for its message.
        or ("NVML_SUCCESS ==" in text and "CUDACachingAllocator.cpp" in text)
        or text in ("could not create a primitive", "could not execute a primitive")
        # No memory for a thread's stack. Without a limit the number of threads is the reason.
        or (text == "Resource temporarily unavailable" and _is_limited())
    )


def requested_bytes(error: BaseException) -> int | None:
    """Return the size of the failed allocation, from the allocator's message."""
    match = re.search(r"[Tt]ried to allocate (\d+(?:\.\d+)?)\s*(bytes|[KMGT]iB)", str(error))
    return int(float(match[1]) * UNITS[match[2].upper().replace("BYTES", "B")]) if match else None
