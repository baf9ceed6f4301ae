"""Causal self-attention kernels behind one signature, and which of them runs."""

from launcher.model.attention.choice import (
    KERNELS,
    Choice,
    NotInstalled,
    choose,
    fuses_scores,
    kernel_for,
)
from launcher.model.attention.kernel import AttentionFunction, AttentionKernel, Setting

__all__ = [
    "KERNELS",
    "NotInstalled",
    "AttentionFunction",
    "AttentionKernel",
    "Choice",
    "Setting",
    "choose",
    "fuses_scores",
    "kernel_for",
]
