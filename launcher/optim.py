"""Optimizer, parameter groups and the learning-rate schedule."""

import math

import torch
from torch import nn

from launcher.config import OptimChoice


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Decay for matrices (and embeddings), none for biases and norms."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for parameter in module.parameters():
        # Under ZeRO-3 a parameter is empty between uses; its real shape is kept beside it.
        shape = getattr(parameter, "ds_shape", parameter.shape)
        (matrices if len(shape) >= 2 else vectors).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(module: nn.Module, choice: OptimChoice) -> torch.optim.Optimizer:
    """Fused AdamW: one kernel over all tensors, on GPUs and on CPUs."""
    return torch.optim.AdamW(
        parameter_groups(module, choice.weight_decay),
        lr=choice.lr,
        betas=choice.betas,
        eps=choice.eps,
        fused=True,
    )


def learning_rate(step: int, choice: OptimChoice, steps: int) -> float:
    """Learning rate of optimizer step `step` (from 1) of `steps`: linear warm-up, then cosine."""
    warmup = choice.warmup_steps if choice.warmup_steps is not None else max(1, steps // 50)
    if step <= warmup:
        return choice.lr * step / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    cosine = 0.5 * (1.0 + math.cos(math.pi * done))
    return choice.lr * (choice.min_lr_ratio + (1.0 - choice.min_lr_ratio) * cosine)
