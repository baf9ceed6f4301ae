"""Tell operators that are made of others."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def is_composite(func: Any) -> bool:
    """Return True for an operator that is made of others, which have the prices."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(func.name(), "CompositeImplicitAutograd") and not has(func.name(), "CUDA")
