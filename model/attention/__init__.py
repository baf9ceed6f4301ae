"""Causal self-attention kernels behind one signature, and which of them runs."""

from launcher.model.attention.kernel import AttentionFunction, AttentionKernel, AttentionSetting
from launcher.model.attention.selection import (
    KERNELS,
    AttentionChoice,
    choose,
    fuses_scores,
    kernel_for,
)

__all__ = [
    "KERNELS",
    "AttentionFunction",
    "AttentionKernel",
    "AttentionChoice",
    "AttentionSetting",
    "choose",
    "fuses_scores",
    "kernel_for",
]
