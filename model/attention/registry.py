"""The attention kernels by name, loaded when a model uses them."""

from __future__ import annotations

from launcher.model.attention import flash, flex
from launcher.model.attention.dense import eager, sdpa, sdpa_mask
from launcher.model.attention.kernel import AttentionKernel, Implementation, dense_mask
from launcher.model.config import AttentionKind


def _flash() -> Implementation:
    from launcher.model.attention.flash_kernel import flash as function

    return Implementation(function=function)


def _flex() -> Implementation:
    from launcher.model.attention.flex_kernel import block_mask
    from launcher.model.attention.flex_kernel import flex as function

    return Implementation(function=function, prepare=block_mask)


KERNELS: dict[AttentionKind, AttentionKernel] = {
    "eager": AttentionKernel(
        load=lambda: Implementation(function=eager, prepare=dense_mask), fused=False
    ),
    "sdpa": AttentionKernel(load=lambda: Implementation(function=sdpa, prepare=sdpa_mask)),
    "flash": AttentionKernel(
        load=_flash, obstacle=flash.obstacle, missing=flash.missing, skips_window=True
    ),
    "flex": AttentionKernel(
        load=_flex, obstacle=flex.obstacle, missing=flex.missing, skips_window=True
    ),
}
"""By the name that a user gives. A new kernel: its file, its line here, and its name in
`model.config.AttentionKind`."""
