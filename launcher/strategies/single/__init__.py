"""One process, one device, everything on it."""

from launcher.strategies.base import Strategy, Variant
from launcher.strategies.compiled import compile_blocks
from launcher.strategies.engine import Engine
from launcher.strategies.native import native_engine
from launcher.strategies.recipe import Recipe


class Single(Strategy):
    """`--strategy single`."""

    name = "single"
    variants = (
        Variant(
            label="single",
            also_called="one device",
            fields={"strategy": "single"},
            level=0,
            complexity=0,
        ),
    )
    needs_group = False
    follows = {}  # noqa: RUF012

    def build(self, recipe: Recipe) -> Engine:
        """Mixed precision computes under autocast."""
        module = recipe.whole_module()
        if recipe.config.loop.compile:
            compile_blocks(module)
        return native_engine(recipe, module)
