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
    recipe = choice.recipe()
    warmup = choice.warmup_steps
    if warmup is None:
        # The rounding error of 0.29 * 100 must not take a step away.
        warmup = max(1, int(recipe.warmup_ratio * steps + 1e-9)) if recipe.warmup_ratio else 0
    if step <= warmup:
        return recipe.lr * step / warmup
    if recipe.schedule == "constant":
        return recipe.lr
    begin = warmup
    if recipe.schedule == "wsd":
        decay = choice.decay_steps if choice.decay_steps is not None else DECAY_SHARE * steps
        begin = max(warmup, steps - math.ceil(decay))
    done = min(1.0, max(0.0, (step - begin) / max(1, steps - begin)))
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if recipe.schedule == "cosine" else 1.0 - done
    return recipe.lr * (recipe.min_lr_ratio + (1.0 - recipe.min_lr_ratio) * left)
