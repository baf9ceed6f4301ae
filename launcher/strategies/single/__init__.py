"""One process, one device, everything on it."""

from typing import TYPE_CHECKING, Final

from launcher.strategies.base import Strategy, Variant

if TYPE_CHECKING:
    from launcher.strategies.build_inputs import BuildInputs
    from launcher.strategies.engine import Engine


def build(inputs: "BuildInputs") -> "Engine":
    """Mixed precision computes under autocast."""
    from launcher.strategies.native import native_engine

    module = inputs.whole_module()
    if inputs.config.loop.compiles:
        from launcher.strategies.compiled import compile_blocks

        compile_blocks(module, kept_share=inputs.resolved.kept_share)
    if not inputs.config.loop.cuda_graphs:
        return native_engine(inputs, module)
    from launcher.strategies.graphs import GraphEngine

    return native_engine(inputs, module, engine=GraphEngine)


SINGLE: Final = Strategy(
    name="single",
    variants=(
        Variant(
            label="single",
            also_called="one device",
            fields={"strategy": "single"},
            level=0,
            complexity=0,
        ),
    ),
    build=build,
    needs_group=False,
    follows={},
)
