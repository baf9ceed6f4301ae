"""FSDP2: parameters, gradients and optimizer states sharded over the ranks.

wrapping.py  builds its engine
grouping.py  groups of parameters that are gathered and reduced together
placement.py how a parameter is divided
forecast/    its allocations, group by group, and its traffic; imported by the forecast only
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from launcher.strategies.base import Strategy, Variant

if TYPE_CHECKING:
    from launcher.strategies.build_inputs import BuildInputs
    from launcher.strategies.engine import Engine

_FULL = Variant(
    label="fsdp",
    also_called="ZeRO-3",
    fields={"strategy": "fsdp"},
    level=3,
    complexity=2,  # beside ZeRO-1
    # FSDP2 moves both or none.
    offloads={"+cpu": {"offload_optimizer": "cpu", "offload_param": "cpu"}},
    sharded_accumulation={"reduce_each_micro_batch": True},
)
_GRAD_OP = replace(
    _FULL,
    label="fsdp-grad-op",
    also_called="ZeRO-2",
    fields={"strategy": "fsdp", "reshard_after_forward": False},
    level=2,
    complexity=3,
    plans_offload=False,
)
_IN_GROUPS: dict[str, Any] = {"replicates": True, "plans_offload": False}
_HYBRID = replace(
    _FULL,
    label="fsdp-hybrid",
    also_called="ZeRO-3 in groups, replicated",
    complexity=3,
    **_IN_GROUPS,
)
_HYBRID_GRAD_OP = replace(
    _GRAD_OP,
    label="fsdp-hybrid-grad-op",
    also_called="ZeRO-2 in groups, replicated",
    complexity=4,
    **_IN_GROUPS,
)


def build(inputs: "BuildInputs") -> "Engine":
    """Imports DTensor, and with it sympy: only where it is used."""
    from launcher.strategies.fsdp import wrapping

    return wrapping.build(inputs)


FSDP: Final = Strategy(
    name="fsdp",
    variants=(_FULL, _GRAD_OP, _HYBRID, _HYBRID_GRAD_OP),
    build=build,
    # by replicas, and by what happens after the forward
    number=lambda chosen: 2 * (chosen.replicate > 1) + (not chosen.reshard_after_forward),
    copies=lambda chosen: True,  # parameters are cast as they are gathered
)
