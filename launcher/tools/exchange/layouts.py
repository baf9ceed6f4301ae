"""Tensors and config.json of an exported model, as transformers names and shapes them."""

import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from launcher.checkpoint.pretrained.folder_weights import Stored
from launcher.checkpoint.pretrained.transformed import Merged
from launcher.config.families import family_for
from launcher.model.foreign.config import ForeignConfig
from launcher.strategies.parameters import parameter_shapes


class Layout(NamedTuple):
    """Names, shapes and values of an exported model, one tensor at a time."""

    architecture: str
    document: Mapping[str, Any]
    """config.json, without the tokens that end a text and the dtype."""
    shapes: Mapping[str, tuple[int, ...]]
    """Name in the files -> shape."""
    read: Callable[[str], Tensor]
    """Tensor of that name."""


def layout_of(model: Stored | Merged) -> Layout:
    """Return how transformers stores a model.

    Raises:
        UserError: it has no such model.
    """
    config = model.config
    return _foreign(model, config) if isinstance(config, ForeignConfig) else _own(model)


def _own(model: Stored | Merged) -> Layout:
    family, theirs = family_for(model.config)
    own = parameter_shapes(model.config)
    parts = {part.theirs: part for part in family.parts(theirs, parameter_shapes(theirs))}
    whole = functools.lru_cache(maxsize=1)(model.read)  # parts of one tensor are read in a row

    def read(name: str) -> Tensor:
        part = parts[name]
        if part.ours not in own:  # a bias that our model was built without
            return torch.zeros(part.their_shape)
        begin = part.start // math.prod(part.shape[1:])
        return part.turned(whole(part.ours)[begin : begin + part.shape[0]])

    shapes = {name: part.their_shape for name, part in parts.items()}
    return Layout(family.architecture, family.write(model.config), shapes, read)


def _foreign(model: Stored | Merged, config: ForeignConfig) -> Layout:
    from launcher.model.foreign.conversion import PREFIX, as_saved, groups
    from launcher.model.foreign.decoder import skeleton

    causal = skeleton(config.document, config.attention)
    empty = dict(causal.named_parameters())
    shapes: dict[str, tuple[int, ...]] = {}
    group_of: dict[str, tuple[str, ...]] = {}
    for group in groups(causal):
        for name, tensor in as_saved(causal, {name: empty[name] for name in group}).items():
            shapes[name] = tuple(tensor.shape)
            group_of[name] = tuple(group)

    @functools.lru_cache(maxsize=1)  # tensors of one group are read in a row
    def converted(group: tuple[str, ...]) -> dict[str, Tensor]:
        return as_saved(causal, {name: model.read(f"{PREFIX}{name}") for name in group})

    def read(name: str) -> Tensor:
        return converted(group_of[name])[name]

    left_out = ("auto_map", "torch_dtype", "transformers_version")  # of the folder it began with
    document = {n: v for n, v in json.loads(config.document).items() if n not in left_out}
    document["architectures"] = [config.architecture]
    return Layout(config.architecture, document, shapes, read)
