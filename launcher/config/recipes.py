"""Defaults of learning rate, schedule and weight decay: by task, and as a resumed run had them."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from launcher.config.schema import RunConfig
from launcher.optim.choice import FROM_SCRATCH, OptimChoice, Recipe, Task
from launcher.optim.registry import OPTIMIZERS
from launcher.util.flags import flag

FINE_TUNING: Final = Recipe(
    lr=2e-5, schedule="cosine", min_lr_ratio=0.0, warmup_steps=0.03, weight_decay=0.0
)
ADAPTERS: Final = Recipe(
    lr=2e-4, schedule="constant", min_lr_ratio=0.0, warmup_steps=0.03, weight_decay=0.0
)
RECIPES: Final[Mapping[Task, tuple[Recipe, str]]] = {
    "training from scratch": (
        FROM_SCRATCH,
        "nanoGPT's for small models, github.com/karpathy/nanoGPT; GPT-3 took lr 6e-4 at 125M "
        "parameters and 6e-5 at 175B, arXiv:2005.14165",
    ),
    "full fine-tuning": (FINE_TUNING, "Stanford Alpaca's, github.com/tatsu-lab/stanford_alpaca"),
    "LoRA": (ADAPTERS, "QLoRA's for 7B, arXiv:2305.14314"),
}
"""Each with its source. All were found with AdamW."""
_TOGETHER: Final = (
    ("lr",),
    ("schedule", "decay_steps"),
    ("min_lr_ratio",),
    ("warmup_steps",),
    ("weight_decay",),
)
"""Fields of which one that is given replaces the others, too."""


def task_of(config: RunConfig) -> Task:
    """Return what is trained: adapters, the weights of `--init-from`, or random ones."""
    if config.model.lora_rank is not None:
        return "LoRA"
    return "training from scratch" if config.model.init_from is None else "full fine-tuning"


def recipe_of(task: Task, optim: OptimChoice) -> Recipe:
    """Return the recipe of a task, at the scale of the optimizer's learning rates."""
    recipe, _ = RECIPES[task]
    return dataclasses.replace(recipe, lr=OPTIMIZERS[optim.optimizer].rates.get(task, recipe.lr))


def fill(config: RunConfig, recipe: Recipe) -> RunConfig:
    """Return the config with the fields of `recipe` that are not given."""
    return config.replace(**dataclasses.asdict(config.optim.recipe(recipe)))


def fill_as_saved(config: RunConfig, saved: Mapping[str, Any]) -> RunConfig:
    """Return the config with the recipe and the precision of the run that `saved` it, except for
    the fields that are given."""
    # What an older version did not save was then what it is from scratch now.
    before = dataclasses.asdict(FROM_SCRATCH) | dict(saved)
    changes: dict[str, Any] = {}
    if config.optim.precision == "auto" and "precision" in saved:
        changes["precision"] = saved["precision"]
    for names in _TOGETHER:
        if all(getattr(config.optim, name) is None for name in names):
            changes |= {name: before[name] for name in names if name in before}
    return config.replace(**changes)


def recipe_line(config: RunConfig, task: Task) -> str:
    """Describe the resolved recipe, where it comes from, and the flags that changed it."""
    entry = OPTIMIZERS[config.optim.optimizer]
    default = recipe_of(task, config.optim)
    changed = [
        field.name
        for field in dataclasses.fields(Recipe)
        if getattr(config.optim, field.name) != getattr(default, field.name)
    ]
    source = RECIPES[task][1]
    if entry.rates_from and "lr" not in changed:
        source += f"; lr {entry.rates_from}"
    but = f"; changed: {', '.join(map(flag, changed))}" if changed else ""
    return f"recipe for {task}: {described(config.optim)} ({source}{but})"


def described(optim: OptimChoice) -> str:
    """Describe a recipe in a few words."""
    recipe = optim.recipe()
    schedule: str = recipe.schedule
    if schedule != "constant":
        schedule += f" to {recipe.min_lr_ratio * recipe.lr:g}"
    warmup = f"{recipe.warmup_steps} steps of warm-up"
    if recipe.warmup_steps < 1:
        warmup = f"{100 * recipe.warmup_steps:.4g}% warm-up"
    return f"lr {recipe.lr:g}, {schedule}, {warmup}, weight decay {recipe.weight_decay:g}"
