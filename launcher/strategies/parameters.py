"""The parameters of a model and their shards, by arithmetic."""

import math
from dataclasses import dataclass
from functools import cache, cached_property

from launcher.model.config import ModelConfig
from launcher.model.foreign.config import ForeignConfig
from launcher.model.linears import PACKED, is_adapter
from launcher.model.parts import block_of, in_block
from launcher.parallel.mesh import WHOLE_MODEL, ModelParallelRank
from launcher.parallel.tensor.shards import ParameterShard, shard_of
from launcher.strategies.shapes import shapes_of_one_block


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model, or a rank's shard of one."""

    name: str
    shape: tuple[int, ...]
    trained: bool = True
    """It has a gradient and optimizer states; frozen parameters are only computed with."""

    @cached_property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @cached_property
    def packed(self) -> bool:
        """True for a quantised weight, whose elements are bytes."""
        return self.name.endswith(PACKED)

    @property
    def category(self) -> str:
        """The ledger's, of its value."""
        return "params" if self.trained else "frozen"


@cache
def parameters_of(
    model: ModelConfig, rank: ModelParallelRank = WHOLE_MODEL
) -> tuple[Parameter, ...]:
    """Return all parameters, or a rank's shards, in `named_parameters`' order; tied ones once."""
    return tuple(
        Parameter(name, shard.shape, trained=model.lora is None or is_adapter(name))
        for name, shard in shards_of(model, rank).items()
    )


@cache
def shards_of(model: ModelConfig, rank: ModelParallelRank) -> dict[str, ParameterShard]:
    """Return name -> the rank's shard of the parameter, in the same order."""
    return {p.name: shard_of(p.name, p.shape, model, rank) for p in _whole_parameters(model)}


@cache
def _whole_parameters(model: ModelConfig) -> tuple[Parameter, ...]:
    """Return the parameters of a whole model, of which one block is built at any depth."""
    if isinstance(model, ForeignConfig):  # whose blocks may differ
        from launcher.strategies.shapes import foreign_shapes  # not in a browser's planner

        return tuple(Parameter(name, shape) for name, shape in foreign_shapes(model))
    found: list[Parameter] = []
    named = shapes_of_one_block(model)
    block = [(name, shape) for name, shape in named if block_of(name) is not None]
    first = next(number for number, (name, _) in enumerate(named) if block_of(name) is not None)
    found += [Parameter(name, shape) for name, shape in named[:first]]
    for layer in range(model.layers):
        found += [Parameter(in_block(name, layer), shape) for name, shape in block]
    found += [Parameter(name, shape) for name, shape in named[first + len(block) :]]
    return tuple(found)


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape, in the same order."""
    return {parameter.name: parameter.shape for parameter in parameters_of(model)}


def trained_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the parameters that have gradients."""
    return {p.name: p.shape for p in parameters_of(model) if p.trained}


def frozen_bytes(model: ModelConfig, element_bytes: int) -> int:
    """Return the bytes of frozen parameters: elements of the compute type, or quantised bytes."""
    if model.lora is None:
        return 0
    frozen = (p for p in parameters_of(model) if not p.trained)
    return sum(p.elements * (1 if p.packed else element_bytes) for p in frozen)
