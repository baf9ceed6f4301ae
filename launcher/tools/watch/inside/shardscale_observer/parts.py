"""Find the model of a program that calls its parts alone, as `model.encoder(x)`."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any


def owner_of(torch: Any, optimizer: Any, roots: Iterable[Any]) -> Any:
    """Return the smallest module with all parameters of an optimizer, if none of the roots has
    them; None if there is none."""
    wanted = {id(one) for group in optimizer.param_groups for one in group["params"]}
    if any(_has(root, wanted) for root in roots):
        return None
    modules = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
    found = [one for one in modules if _has(one, wanted)]
    return min(found, key=_modules, default=None)


def outermost_first(roots: Iterable[Any]) -> list[Any]:
    """Return modules in an order in which none comes before one that it is a part of."""
    return sorted(roots, key=_modules, reverse=True)


def is_beside_steps(recorder: Any, module: Any) -> bool:
    """Return True for a module that no optimizer trains, if one has run without gradients beside
    every step that was recorded: a teacher, or what encodes the batch."""
    groups = [group for one in recorder.optimizers for group in one.param_groups]
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    always = len(recorder.evaluated_after - {0}) >= recorder.steps > 1
    return always and all(id(parameter) not in trained for parameter in module.parameters())


def _has(module: Any, wanted: set[int]) -> bool:
    return wanted <= set(map(id, module.parameters()))


def _modules(module: Any) -> int:
    return sum(1 for _ in module.modules())
