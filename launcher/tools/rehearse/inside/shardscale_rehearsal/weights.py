"""Fill large tensors of the host once where their pages are shared: torch draws on one core."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

DRAWS = ("normal_", "uniform_")


def prepare(module: Any) -> None:
    """Draw a tensor whose memory repeats itself until it does so."""
    repeats = ctypes.CDLL(None).shardscale_repeats
    repeats.restype = ctypes.c_size_t
    tensor = module.torch.Tensor
    for name in DRAWS:
        setattr(tensor, name, _drawn_once(getattr(tensor, name), repeats))


def _drawn_once(draw: Callable[..., Any], repeats: Any) -> Callable[..., Any]:
    @functools.wraps(draw)
    def drawn(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        # 64 MiB of fp32: library/host.h shares the pages of no smaller block
        if tensor.is_cpu and tensor.numel() > 1 << 24 and tensor.is_contiguous():
            period = repeats(ctypes.c_void_p(tensor.data_ptr())) // tensor.element_size()
            if 0 < period < tensor.numel():
                draw(tensor.view(-1)[:period], *args, **kwargs)
                return tensor
        return draw(tensor, *args, **kwargs)

    return drawn
