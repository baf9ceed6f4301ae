"""Causal self-attention kernels behind one signature, and which of them runs."""

from model.attention import dense, flash, flex
from model.attention.choice import Choice, NotInstalled, choose, kernel_for
from model.attention.kernel import KERNELS, AttentionFunction, AttentionKernel, Setting

__all__ = [
    "KERNELS",
    "NotInstalled",
    "AttentionFunction",
    "AttentionKernel",
    "Choice",
    "Setting",
    "choose",
    "dense",
    "flash",
    "flex",
    "kernel_for",
]
