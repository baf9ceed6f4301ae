"""One process, one device, everything on it."""

from launcher.memory.materialize import materialize_whole
from launcher.optim.dtypes import dtypes
from launcher.strategies.compiled import compile_whole
from launcher.strategies.engine import Engine, Recipe
from launcher.strategies.in_backward import InBackwardEngine
from launcher.strategies.native import NativeEngine


def build(recipe: Recipe) -> Engine:
    """Mixed precision computes under autocast."""
    module = recipe.meta_module()
    device = recipe.world.device
    optim = recipe.config.optim
    types = dtypes(optim)
    materialize_whole(module, recipe.initial_value, device=device, dtype=types.stored)
    if recipe.config.loop.compile:
        compile_whole(module)
    engine = InBackwardEngine if optim.optimizer_in_backward else NativeEngine
    return engine(
        module,
        recipe.new_optimizer(module),
        accumulation=recipe.accumulation,
        clip=optim.clip,
        device=device,
        autocast=types.autocast,
        scaled=optim.precision == "fp16",
    )
