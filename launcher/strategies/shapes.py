"""Names and shapes of a decoder's parameters, read off the decoder itself."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from launcher.model.config import ModelConfig
from launcher.model.foreign.config import ForeignConfig
from launcher.model.gpt import GPT


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
    """(name, shape) of every parameter of the model with a single block, tied ones once, in the
    order of `named_parameters`."""
    with torch.device("meta"), _WithoutValues():
        one = GPT(dataclasses.replace(model, layers=1, activation_checkpointing="none"))
    return [(name, tuple(p.shape)) for name, p in one.named_parameters()]


def foreign_shapes(model: ForeignConfig) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every parameter of a decoder of transformers, likewise."""
    from launcher.model.foreign.decoder import ForeignDecoder

    with torch.device("meta"):
        whole = ForeignDecoder(model)
    return [(name, tuple(p.shape)) for name, p in whole.named_parameters()]
