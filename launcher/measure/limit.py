"""`--memory-limit`: make a big machine play a small one, and tell when memory ran out."""

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
    """From now on this process gets at most so much more; `limit` is the flag's text.

    On a GPU a cap of the caching allocator; on a CPU the kernel refuses to grow private memory
    (RLIMIT_DATA) beyond what the process has by now plus the limit.

    Raises:
        UserError: more than the GPU has.
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
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(match[1]) * 1024 + limit_bytes, hard))


def _map_large_blocks() -> None:
    """Have glibc map every large block for itself, and give it back when it is freed.

    It raises its threshold with every large block that is freed, so that later ones, up to 32 MiB,
    come from a heap that fragments: a run would need up to 1.5 times its tensors, and not the same
    twice. With the threshold held, at the price of fresh pages, live tensors and private memory
    differ by some 16 MiB.
    """
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no mallopt
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, LARGE_BYTES)


def lift_limit(device: torch.device) -> None:
    """Undo the CPU limit, so that a failure can be reported in peace."""
    if device.type == "cpu":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device, or the host, had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    # oneDNN does not say why it could not; what it cannot do at all has no primitive *descriptor*.
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in text
        or "not enough memory" in text
        # Asking NVML who else has memory, to tell it in its message, torch takes no failure.
        or ("NVML_SUCCESS ==" in text and "CUDACachingAllocator.cpp" in text)
        or text in ("could not create a primitive", "could not execute a primitive")
    )


def requested_bytes(error: BaseException) -> int | None:
    """How much the failing allocation asked for, from the allocator's message."""
    match = re.search(r"[Tt]ried to allocate (\d+(?:\.\d+)?)\s*(bytes|[KMGT]iB)", str(error))
    return int(float(match[1]) * UNITS[match[2].upper().replace("BYTES", "B")]) if match else None
