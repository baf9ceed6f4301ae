"""Follow what models of images and videos compute of their sizes, which they read on the host.

Towers such as Qwen-VL's take images of any size, as patches one after the other, beside a tensor
of their rows and columns: loops over it, and lengths that come of it, decide shapes.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from shardscale_rehearsal.following import followed

_SIZES = ("grid_thw", "grid_hw", "grid_hws", "cu_seqlens")
"""Ends of names of parameters that have sizes."""
_followed_classes: set[type] = set()


def prepare(module: Any) -> None:
    """Follow what each model that is made does with sizes, and in forward, each of its parts."""
    made = module.PreTrainedModel.__init__

    @functools.wraps(made)
    def make(model: Any, *args: Any, **kwargs: Any) -> None:
        _follow(type(model))
        made(model, *args, **kwargs)

    module.PreTrainedModel.__init__ = make


def _follow(class_: type) -> None:
    if class_ in _followed_classes:
        return
    _followed_classes.add(class_)
    for name, function in inspect.getmembers(class_, inspect.isfunction):
        parameters = list(inspect.signature(function).parameters)
        if parameters[:1] == ["self"] and any(one.endswith(_SIZES) for one in parameters):
            setattr(class_, name, _followed(function))


def _followed(function: Any) -> Any:
    follows = followed(function)

    @functools.wraps(function)
    def follow(part: Any, *args: Any, **kwargs: Any) -> Any:
        if any(map(_is_compiled, part.modules())):  # nothing is compiled within what is followed
            return function(part, *args, **kwargs)
        for inner in part.modules():  # whose forward is called again where it is recomputed
            _follow(type(inner))
        return follows(part, *args, **kwargs)

    return follow


def _is_compiled(module: Any) -> bool:
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
