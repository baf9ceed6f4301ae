"""A strategy: its names, variants, types and engine.

Code outside of this folder that depends on the strategy asks here, and keeps no table of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from launcher.config.schema import RunConfig
from launcher.config.sharding import ShardingChoice
from launcher.optim.dtypes import Dtypes, dtypes
from launcher.util.packages import version_of

if TYPE_CHECKING:
    from launcher.strategies.build_inputs import BuildInputs
    from launcher.strategies.engine import Engine

TORCH: Final = ("2.11", "2.13", "2.14", "2.15")
"""Versions of torch that the ports of its buffers were held against."""

Fields = Mapping[str, Any]
"""Flat names of RunConfig -> values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way of sharding, as tables, folders and grids call it."""

    label: str
    also_called: str
    """The same choice in the other vocabulary (ZeRO stages, FSDP's words)."""
    fields: Fields
    """Fields that select it."""
    level: int
    """Sharded states: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too."""
    complexity: int
    """Place among all variants, from the simplest: of two that are as fast `plan` recommends the
    lower one."""
    replicates: bool = False
    """Needs --replicate besides: groups of ranks shard, and hold the same."""
    offloads: Mapping[str, Fields] = field(default_factory=dict)
    """Ways to offload to host memory: suffix of the label -> what is set."""
    sharded_accumulation: Fields = field(default_factory=dict)
    """Fields that keep accumulated gradients sharded, where that is a choice."""
    plans_offload: bool = True
    """The planner tries these offloads, too."""
    fetches_by_module: bool = False
    """Parameters are fetched and released around each module, which a trace must follow."""
    planned: bool = True
    """False where another variant is the same, and tried instead."""

    @property
    def shards_parameters(self) -> bool:
        """Parameters can leave the device together with the optimizer."""
        return self.level == 3 or "reshard_after_forward" in self.fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """One `--strategy`, and what holds for most."""

    name: str
    variants: tuple[Variant, ...]
    build: Callable[["BuildInputs"], "Engine"]
    """The engine; imports what only it needs."""
    number: Callable[[ShardingChoice], int] = lambda sharding: 0
    """Number of the variant of a (chosen) sharding."""
    copies: Callable[[ShardingChoice], bool] = lambda sharding: False
    """The model's parameters are copies of the stored ones, in the type to compute in."""
    needs_group: bool = True
    """Even a single process needs a process group."""
    keeps_master: bool = False
    """Master weights are held beside the parameters that compute."""
    imports_bytes: int = 0
    """Host memory that importing its library takes (measured, see launcher/forecast/fit.py)."""
    follows: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"torch": TORCH})
    """Library -> the versions whose buffers its forecast was held against (bench/prediction.py)."""

    def variant(self, sharding: ShardingChoice) -> Variant:
        """Return the variant of a (chosen) sharding."""
        return self.variants[self.number(sharding)]

    def dtypes(self, config: RunConfig) -> Dtypes:
        """Types of storage, computation and communication."""
        return dtypes(config.optim, copies=self.copies(config.sharding))


def missing_library(strategy: Strategy) -> str | None:
    """Name the library that a strategy lacks, with the command that installs it, or None."""
    for library, known in strategy.follows.items():
        if find_spec(library) is None:
            return (
                f"--strategy {strategy.name} needs {library}, which is not installed: "
                f"pip install '{library}>={known[0]}'"
            )
    return None


def unknown_versions(strategy: Strategy) -> str | None:
    """Say why a strategy's bytes are unknown with the libraries installed here, or None."""
    if missing := missing_library(strategy):
        return missing
    for library, known in strategy.follows.items():
        installed = version_of(library) or ""
        if not installed.startswith(tuple(f"{each}." for each in known)):
            return (
                f"the bytes of --strategy {strategy.name} are known for {library} "
                f"{', '.join(known)}, and this is {installed or 'of no known version'}: "
                "bench/prediction.py shows whether they still hold"
            )
    return None
