"""Causal self-attention kernels behind one signature, and which of them runs."""

from launcher.model.attention.choice import (
    KERNELS,
    AttentionChoice,
    MissingKernel,
    choose,
    fuses_scores,
    kernel_for,
)
from launcher.model.attention.kernel import AttentionFunction, AttentionKernel, AttentionSetting

__all__ = [
    "KERNELS",
    "MissingKernel",
    "AttentionFunction",
    "AttentionKernel",
    "AttentionChoice",
    "AttentionSetting",
    "choose",
    "fuses_scores",
    "kernel_for",
]
