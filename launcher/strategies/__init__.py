"""Ways of sharding: one file each, built by name behind the Engine protocol."""

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from launcher.strategies.engine import Engine, Recipe

STRATEGIES: Final = ("single", "ddp", "fsdp", "zero")


def build(recipe: "Recipe") -> "Engine":
    """Build the engine of the recipe's (resolved) strategy.

    Only that strategy's module is imported: deepspeed alone takes longer than a small run's start.
    """
    name = recipe.config.sharding.strategy
    assert name in STRATEGIES
    engine: Engine = importlib.import_module(f"launcher.strategies.{name}").build(recipe)
    return engine
