"""Names and shapes of a decoder's parameters, read off the decoder itself."""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from launcher.model.build import new_decoder
from launcher.model.config import ModelConfig
from launcher.model.foreign.config import ForeignConfig


class _WithoutValues(TorchFunctionMode):
    """Modules are built without drawing values: on the meta device, which has no room for any,
    torch would import its compiler to do so."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"]
        return func(*args, **kwargs)


def shapes_of_one_block(model: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Return (name, shape) of every parameter of the model with a single block, tied ones once, in
    the order of `named_parameters`."""
    one = _on_meta(dataclasses.replace(model, layers=1, activation_checkpointing="none"))
    return [(name, tuple(p.shape)) for name, p in one.named_parameters()]


def foreign_shapes(model: ForeignConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Return the same of every parameter of a decoder of transformers, or of its shard."""
    named = [(name, tuple(p.shape)) for name, p in _on_meta(model).named_parameters()]
    if (part := model.part) is None:
        return named
    from launcher.model.foreign.matrices import local_shape

    return [(name, local_shape(name, shape, model, part)) for name, shape in named]


@cache
def tied_modules(model: ModelConfig) -> dict[str, str]:
    """Module that computes with a parameter of another one -> that one: the head, if it is tied."""
    if not isinstance(model, ForeignConfig):
        model = dataclasses.replace(model, layers=1, activation_checkpointing="none")
    first: dict[nn.Parameter, str] = {}
    found = {}
    for name, parameter in _on_meta(model).named_parameters(remove_duplicate=False):
        module = name.rpartition(".")[0]
        if (owner := first.setdefault(parameter, module)) != module:
            found[module] = owner
    return found


def _on_meta(model: ModelConfig) -> nn.Module:
    with torch.device("meta"), _WithoutValues():
        return new_decoder(model)
