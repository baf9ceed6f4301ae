"""One process, one device, everything on it."""

import torch

from launcher.strategies.engine import Engine, Recipe
from launcher.strategies.materialize import materialize_whole
from launcher.strategies.native import NativeEngine


def build(recipe: Recipe) -> Engine:
    """fp32 parameters; bf16 computes under autocast."""
    module = recipe.meta_module()
    device = recipe.world.device
    materialize_whole(module, recipe.initial_value, device=device, dtype=torch.float32)
    optim = recipe.config.optim
    return NativeEngine(
        module,
        recipe.new_optimizer(module),
        accumulation=recipe.accumulation,
        clip=optim.clip,
        device=device,
        autocast=torch.bfloat16 if optim.precision == "bf16" else None,
    )
