"""The parameters of a model and their shards, by arithmetic."""

import dataclasses
import math
from dataclasses import dataclass
from functools import cache

import torch

from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the whole model."""

    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def layer(self) -> int | None:
        """Its block, or None outside of them."""
        parts = self.name.split(".")
        return int(parts[1]) if parts[0] == "blocks" else None


@cache
def parameters_of(model: ModelConfig) -> tuple[Parameter, ...]:
    """All parameters in the order of `named_parameters`, tied ones once.

    Only one block is built, whatever the depth.
    """
    with torch.device("meta"):
        one = GPT(dataclasses.replace(model, layers=1))
    found: list[Parameter] = []
    named = [(name, tuple(p.shape)) for name, p in one.named_parameters()]
    block = [(name, shape) for name, shape in named if name.startswith("blocks.")]
    first = next(number for number, (name, _) in enumerate(named) if name.startswith("blocks."))
    found += [Parameter(name, shape) for name, shape in named[:first]]
    for layer in range(model.layers):
        found += [Parameter(n.replace(".0.", f".{layer}.", 1), shape) for n, shape in block]
    found += [Parameter(name, shape) for name, shape in named[first + len(block) :]]
    return tuple(found)


def row_shard(
    shape: tuple[int, ...], *, rank: int, ranks: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, shape with padding) of a rank's rows: `torch.chunk` along dimension 0."""
    chunk = -(-shape[0] // ranks)
    mine = max(0, min(chunk, shape[0] - rank * chunk))
    return (mine, *shape[1:]), (chunk, *shape[1:])
