"""Say where a strategy's own Python runs: its hooks take the host more than operators tell.

What they take is fitted to published runs (launcher/forecast/efficiency.py), all that they dispatch
themselves included.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

FREE, FETCH, GRADIENT, GROUP = range(4)
"""Kinds of hooks, as in launcher/tools/rehearse/seconds.py; the first belongs to one before it."""

_DEEPSPEED = "deepspeed.runtime.zero."
_OFFLOAD = (_DEEPSPEED + "parameter_offload", "DeepSpeedZeRoOffload")
_GRADIENTS = "reduce_ready_partitions_and_remove_grads"
HOOKS = (
    (*_OFFLOAD, "pre_sub_module_forward_function", FETCH),
    (*_OFFLOAD, "post_sub_module_forward_function", FREE),
    (*_OFFLOAD, "pre_sub_module_backward_function", FETCH),
    (*_OFFLOAD, "post_sub_module_backward_function", FREE),
    (_DEEPSPEED + "stage3", "DeepSpeedZeroOptimizer_Stage3", _GRADIENTS, GRADIENT),
    (_DEEPSPEED + "stage_1_and_2", "DeepSpeedZeroOptimizer", _GRADIENTS, GRADIENT),
    *(
        (module, "FSDPParamGroup", method, kind)
        for module in (
            "torch.distributed.fsdp._fully_shard._fsdp_param_group",
            "torch.distributed._composable.fsdp._fsdp_param_group",  # before torch 2.6
        )
        for method, kind in (
            ("pre_forward", GROUP),
            ("post_forward", FREE),
            ("pre_backward", GROUP),
            ("post_backward", FREE),
        )
    ),
    ("torch.distributed.fsdp._flat_param", "FlatParamHandle", "unshard", GROUP),
)


def follow(within: Callable[[int], Any]) -> list[tuple[Any, str, Any]]:
    """Wrap the hooks of what has been imported; `within(kind)` is the context that each runs in.
    Returns (class, name, method before)."""
    undo = []
    for module, owner, name, kind in HOOKS:
        class_ = getattr(sys.modules.get(module), owner, None)
        before = getattr(class_, name, None)
        if before is not None:
            undo.append((class_, name, before))
            setattr(class_, name, _wrapped(before, kind, within))
    return undo


def _wrapped(method: Any, kind: int, within: Callable[[int], Any]) -> Any:
    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = kind
        if kind == FETCH and args:  # a module without parameters of its own fetches none
            found = FETCH if next(args[0].parameters(recurse=False), None) is not None else FREE
        with within(found):
            return method(self, *args, **kwargs)

    return wrapped
