"""Everything that is refused because choices do not go together: one ordered list.

A rule is a pure function of a `Setting`: it yields a sentence for each condition that applies, with
the value and the fix. The first sentence of the first rule is what a run is refused with;
`shardscale matrix` prints the table of what goes with what from the same list.
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Final

from launcher.config.rules import compute, numerics, sharding
from launcher.config.rules.setting import Setting as Setting
from launcher.config.schema import RunConfig
from launcher.extras import how_to_install

Rule = Callable[[Setting], Iterator[str]]

RULES: Final[tuple[Rule, ...]] = (
    sharding.strategy,
    sharding.offload,
    sharding.fsdp_only,
    sharding.replicate,
    sharding.grad_accum_dtype,
    compute.seq_len,
    compute.batch,
    numerics.optimizer,
    numerics.moments,
    numerics.in_backward,
    numerics.bf16_pure,
    numerics.fp16,
    numerics.fp8,
    numerics.tf32,
    numerics.schedule,
    compute.memory_snapshot,
    compute.compiled,
    compute.activation_offload,
)


def refusal(setting: Setting) -> str | None:
    """Why a setting cannot run, or None."""
    return next((sentence for rule in RULES for sentence in rule(setting)), None)


def missing_package(config: RunConfig) -> str | None:
    """What a setting that runs needs and is not installed here, with the fix, or None."""
    if config.optim.precision == "fp8" and find_spec("torchao") is None:
        return f"--precision fp8 needs torchao: {how_to_install('gpu')}"
    return None
