"""The learning-rate schedule."""

import math

from launcher.optim_choice import OptimChoice


def learning_rate(step: int, choice: OptimChoice, steps: int) -> float:
    """Learning rate of optimizer step `step` (from 1) of `steps`: linear warm-up, then cosine."""
    warmup = choice.warmup_steps if choice.warmup_steps is not None else max(1, steps // 50)
    if step <= warmup:
        return choice.lr * step / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    cosine = 0.5 * (1.0 + math.cos(math.pi * done))
    return choice.lr * (choice.min_lr_ratio + (1.0 - choice.min_lr_ratio) * cosine)
