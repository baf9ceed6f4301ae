"""The learning-rate schedule."""

import math

from launcher.optim.choice import OptimChoice

DECAY_SHARE = 0.2
"""Of a warm-up-stable-decay schedule."""


def learning_rate(step: int, choice: OptimChoice, steps: int) -> float:
    """Learning rate of optimizer step `step` (from 1) of `steps`: linear warm-up, then down to
    `min_lr_ratio` of the peak as the schedule has it.

    A pure function, so that a resumed run has the rates it would have had.
    """
    warmup = choice.warmup_steps if choice.warmup_steps is not None else max(1, steps // 50)
    if step <= warmup:
        return choice.lr * step / warmup
    if choice.schedule == "constant":
        return choice.lr
    begin = warmup
    if choice.schedule == "wsd":
        decay = choice.decay_steps if choice.decay_steps is not None else DECAY_SHARE * steps
        begin = max(warmup, steps - math.ceil(decay))
    done = min(1.0, max(0.0, (step - begin) / max(1, steps - begin)))
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if choice.schedule == "cosine" else 1.0 - done
    return choice.lr * (choice.min_lr_ratio + (1.0 - choice.min_lr_ratio) * left)
