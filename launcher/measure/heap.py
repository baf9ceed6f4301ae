"""`--memory-limit` on a CPU, made to count what tensors need."""

import contextlib
import ctypes

import torch

from launcher.measure.limit import limit_memory
from launcher.sizes import parse_bytes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGE_BYTES = 128 * 2**10  # glibc's threshold at the start of a process


def apply_limit(limit: str, device: torch.device) -> None:
    """Limit this process from now on; `limit` is the flag's text.

    glibc raises its threshold with every large block that is freed, so that later ones, up to
    32 MiB, come from a heap that fragments: a run would need up to 1.5 times its tensors, and not
    the same twice. With the threshold held each tensor is mapped for itself and gone when freed,
    at the price of fresh pages; live tensors and private memory then differ by some 16 MiB.

    Raises:
        UserError: more than the GPU has.
    """
    if device.type == "cpu":
        with contextlib.suppress(OSError, AttributeError):  # other C libraries have no mallopt
            library = ctypes.CDLL(None)
            library.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
            library.mallopt(M_TRIM_THRESHOLD, LARGE_BYTES)
    limit_memory(parse_bytes(limit, "--memory-limit"), device)
