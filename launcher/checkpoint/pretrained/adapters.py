"""Which projections of a family's model our adapters are beside, and how they are named there."""

import dataclasses
from dataclasses import dataclass

from launcher.config.families import Part, family_for
from launcher.model import parts
from launcher.model.config import ModelConfig
from launcher.model.lora_config import LoraTarget
from launcher.model.parts import is_projection, projection_of
from launcher.strategies.parameters import parameter_shapes


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """A projection of theirs that can have an adapter."""

    part: Part
    """The rows of our matrix that it is."""
    target: LoraTarget
    sizes: tuple[int, ...]
    """Rows of the matrices that it is made of on our side: where query, key and value are one of
    theirs, ours are three."""
    number: int
    """How many matrices of ours come before them in the same one."""

    @property
    def module(self) -> str:
        """Its name there."""
        return self.part.theirs.removesuffix(".weight")

    @property
    def ours(self) -> str:
        """The name of our projection."""
        return self.part.ours.removesuffix(".weight")

    @property
    def inner(self) -> int:
        """Columns."""
        return self.part.shape[1]

    @property
    def first(self) -> int:
        """Its first row in our matrix."""
        return self.part.start // self.inner


def projections(config: ModelConfig) -> list[Projection]:
    """All of them, in the order of our parameters.

    Raises:
        UserError: no family of transformers has this model.
    """
    family, theirs = family_for(dataclasses.replace(config, lora=None))
    found: list[Projection] = []
    for part in family.parts(theirs, parameter_shapes(theirs)):
        name = projection_of(part.ours)
        if name is None or not is_projection(part.ours):
            continue
        rows, inner = part.shape
        target, sizes, _ = parts.projections(config)[name]
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        whole = rows == sum(sizes)
        found.append(
            Projection(
                part=part,
                target=target,
                sizes=sizes if whole else (rows,),
                number=starts.index(part.start // inner),
            )
        )
    return found
