"""Single, DDP, FSDP and ZeRO: how states are sharded, each with all its facts in its own folder.

In: `BuildInputs` (build_inputs.py), from which a strategy builds. Out: an `Engine` (engine.py) that
the training loop drives, and its training state as ranges of flattened tensors (flat_shards.py).
Knows no data, no files and no model by name: it asks model/parts.py for blocks and head.
"""

from typing import Final

from launcher.config.schema import RunConfig
from launcher.strategies.base import Strategy, Variant
from launcher.strategies.ddp import DDP
from launcher.strategies.fsdp import FSDP
from launcher.strategies.single import SINGLE
from launcher.strategies.zero import ZERO

STRATEGIES: Final[dict[str, Strategy]] = {s.name: s for s in (SINGLE, DDP, FSDP, ZERO)}
VARIANTS: Final[dict[str, Variant]] = {
    variant.label: variant for strategy in STRATEGIES.values() for variant in strategy.variants
}
"""By label, in the order in which tables show them."""


def strategy_of(config: RunConfig) -> Strategy:
    """Return the strategy of a config in which it is chosen."""
    assert config.sharding.strategy is not None
    return STRATEGIES[config.sharding.strategy]


def variant_of(config: RunConfig) -> Variant:
    """Return the variant of a config in which the strategy is chosen."""
    return strategy_of(config).variant(config.sharding)
