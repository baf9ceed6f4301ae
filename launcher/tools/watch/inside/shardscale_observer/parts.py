"""Find the model of a program that calls its parts alone, as `model.encoder(x)`, and name parts."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

from shardscale_observer.owners import unwrapped
from shardscale_observer.reading import is_trainable


def owner_of(torch: Any, optimizer: Any, roots: Iterable[Any]) -> Any:
    """Return the smallest module with all parameters of an optimizer, if none of the roots has
    them; None if there is none."""
    wanted = {id(one) for group in optimizer.param_groups for one in group["params"]}
    if any(_has(root, wanted) for root in roots):
        return None
    modules = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
    found = [one for one in modules if _has(one, wanted)]
    return min(found, key=_modules, default=None)


def named(module: Any, known: dict[int, str], roots: Any, prefixes: Any) -> dict[int, str]:
    """Return the names that are known with those of a root module's parts.

    `prefixes` gets the class of a root that is frozen, as a teacher, or some of whose names another
    root has, as a GAN's two.
    """
    parts = {id(inner): unwrapped(name) for name, inner in module.named_modules()}
    shared = {*parts.values()} & {*known.values()} - {""}
    if (shared or not is_trainable(module)) and known.keys().isdisjoint(parts):
        prefix = prefixes[module] = f"{type(module).__name__}."
        parts = {number: (prefix + name).rstrip(".") for number, name in parts.items()}
    # the names of the outer module, whichever is called first
    holds_others = any(id(root) in parts for root in roots)
    return known | parts if holds_others else parts | known


def name_of(modules: Any, known: dict[int, str]) -> str:
    """Return the name of the innermost of the modules that are in their forward, of those that are
    made meanwhile, as by DDP for compiled code, that of the one around them."""
    names = (known[id(one)] for one in reversed(modules) if id(one) in known)
    return next(names, type(modules[-1]).__name__) if modules else ""


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
