"""DistributedDataParallel: every rank holds everything, gradients are averaged."""

from torch.nn.parallel import DistributedDataParallel

from launcher.memory.materialize import materialize_whole
from launcher.optim.dtypes import dtypes
from launcher.strategies.compiled import compile_whole
from launcher.strategies.engine import Engine, Recipe
from launcher.strategies.native import NativeEngine


def build(recipe: Recipe) -> Engine:
    """Gradients live in the reduction buckets, so they are held once; mixed precision under
    autocast."""
    module = recipe.meta_module()
    device = recipe.world.device
    optim = recipe.config.optim
    types = dtypes(optim)
    materialize_whole(module, recipe.initial_value, device=device, dtype=types.stored)
    if recipe.config.loop.compile:
        compile_whole(module)
    wrapped = DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )

    def set_sync(last: bool) -> None:
        wrapped.require_backward_grad_sync = last

    return NativeEngine(
        wrapped,
        recipe.new_optimizer(wrapped),
        accumulation=recipe.accumulation,
        clip=optim.clip,
        device=device,
        autocast=types.autocast,
        scaled=optim.precision == "fp16",
        set_sync=set_sync,
        keeps_gradients=True,  # the buckets stay, so a ledger without them would be wrong
    )
