"""One process, one device, everything on it."""

from collections.abc import Mapping

from launcher.config.schema import ShardingChoice
from launcher.memory.materialize import materialize_whole
from launcher.memory.timeline import Timeline
from launcher.optim.dtypes import dtypes
from launcher.strategies.base import Variant
from launcher.strategies.buffers import Buffers, Whole
from launcher.strategies.compiled import compile_whole
from launcher.strategies.engine import Engine, Recipe
from launcher.strategies.in_backward import InBackwardEngine
from launcher.strategies.native import NativeEngine
from launcher.strategies.rank import Rank
from launcher.strategies.traffic import Traffic, Wire


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


class Single:
    """`--strategy single`."""

    name = "single"
    variants: tuple[Variant, ...] = (
        Variant(label="single", also_called="one device", fields={"strategy": "single"}, level=0),
    )
    needs_group = False
    keeps_master = False
    imports_bytes = 0
    follows: Mapping[str, tuple[str, ...]] = {}
    build = staticmethod(build)

    def variant(self, sharding: ShardingChoice) -> Variant:
        """There is one."""
        return self.variants[0]

    def casts_parameters(self, sharding: ShardingChoice) -> bool:
        """Autocast does."""
        return False

    def memory(self, rank: Rank, timeline: Timeline) -> Buffers:
        """Everything, as it comes."""
        return Whole(rank, timeline)

    def traffic(self, wire: Wire) -> Traffic:
        """Nobody to talk to."""
        return Traffic()
