"""Rotary position embedding (RoFormer, arXiv:2104.09864), and its stretched form of Llama 3."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from launcher.model.config import ModelConfig, RopeScaling

Rotation = tuple[Tensor, Tensor]
"""cos and sin [T, 1, head_dim / 2] of the angle that each position turns each pair by, in fp32."""


def rotation(config: ModelConfig, positions: Tensor) -> Rotation:
    """One table for all blocks; positions [T] int64, on the device of the model."""
    even = torch.arange(0, config.head_size, 2, device=positions.device, dtype=torch.float32)
    frequency = 1.0 / config.rope_theta ** (even / config.head_size)
    if config.rope_scaling is not None:
        frequency = _stretched(frequency, config.rope_scaling)
    angle = positions.float()[:, None, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """x [B, T, H, head_dim] with each pair (i, i + head_dim / 2) turned, computed in fp32."""
    cos, sin = rotation
    left, right = x.float().chunk(2, dim=-1)
    turned = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
    return turned.to(x.dtype)


def _stretched(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    """Wavelengths that the original context holds few of are lengthened by the factor, short ones
    kept, those between blended (`rope_type` llama3 of transformers' modeling_rope_utils)."""
    factor, low, high, original = scaling
    turns = original * frequency / (2 * math.pi)  # in the original context
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequency + (1.0 - kept) * frequency / factor
