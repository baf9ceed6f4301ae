"""`index.json`: contents of a checkpoint and their places, in JSON that is checked before use."""

import dataclasses
import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from annotated_types import Interval, MinLen

from launcher.checkpoint.document import (
    INDEX_NAME,
    Count,
    damaged,
    file_size_bytes,
    read_document,
    write_document,
)
from launcher.checkpoint.extra import Extra, saved_model
from launcher.checkpoint.geometry import Checksum, Name, Positive, Range, uncovered
from launcher.checkpoint.rng import is_state
from launcher.optim.choice import OptimChoice
from launcher.optim.registry import OPTIMIZERS, checkpointed, states_of
from launcher.strategies.flat_shards import MASK, PARAM
from launcher.util.errors import UserError
from launcher.util.files import run_folder_of

_POSITIONS = "wpe.weight"
ELEMENT_BYTES = 4  # of fp32, as which everything but masks is stored
CHUNK_ELEMENTS = 2**20
"""Elements under one checksum, which is also the largest piece in memory at once: 4 MiB."""

Shape = tuple[Positive, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFile:
    """A file that one rank wrote."""

    name: Name
    size_bytes: Positive
    header_bytes: Positive
    header_checksum: Checksum
    ranges: Sequence[Range]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Contents of `index.json`. The types are its schema, which reading enforces exactly."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}  # noqa: RUF012

    step: Count
    world_size: Positive
    shapes: Annotated[Mapping[Name, Shape], MinLen(1)]
    kinds: Sequence[Name]
    counters: Mapping[Name, Annotated[float, Interval(ge=0, le=2**53)]]
    extra: Extra
    rng: Sequence[Mapping[Name, str]]
    """For each rank that saved: device type -> base64 of torch's generator state."""
    files: Sequence[RankFile]
    own_shapes: Mapping[Name, Mapping[Name, Shape]] = field(default_factory=dict)
    """kind -> parameter -> shape, for kinds that are not of every parameter in its shape."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Contents):
    """An index, read and checked: complete, and consistent with the sizes of its files."""

    path: Path

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read the index of the checkpoint folder `path`; touches no tensor data.

        Raises:
            DamagedCheckpoint: something is missing, cut off, changed or does not fit together.
            UserError: written in another version of the format.
        """
        checkpoint = cls(path=path, **vars(read_document(path, Contents)))
        checkpoint.check_agreement()
        checkpoint.check_coverage()
        checkpoint.check_sizes()
        if (missing := checkpoint.missing_state()) is not None:
            raise damaged(path, INDEX_NAME, missing)
        return checkpoint

    def write(self) -> None:
        """Write `index.json` into the folder."""
        fields = {name: value for name, value in vars(self).items() if name != "path"}
        write_document(self.path, json.loads(json.dumps(fields, default=_plain)))

    @property
    def run_folder(self) -> Path:
        """Folder of the run that saved it."""
        return run_folder_of(self.path)

    @property
    def size_bytes(self) -> int:
        """Bytes of all rank files."""
        return sum(file.size_bytes for file in self.files)

    def check_agreement(self) -> None:
        """Check entries of the index against each other.

        Raises:
            DamagedCheckpoint: two contradict each other.
        """
        names = [file.name for file in self.files]
        problem = None
        if PARAM not in self.kinds or len(set(self.kinds)) < len(self.kinds):
            problem = f"has the kinds {reprlib.repr(self.kinds)}, not {PARAM} and others once each"
        elif len(set(names)) < len(names):
            problem = "names a file twice"
        elif not self.own_shapes.keys() <= set(self.kinds):
            problem = "has shapes of a kind that is not there"
        elif len(self.rng) not in (0, self.world_size):
            problem = f"has generators of {len(self.rng)} ranks and is of {self.world_size}"
        elif not all(is_state(*state) for states in self.rng for state in states.items()):
            problem = "has a generator's state in rng that is none"
        else:
            problem = self._problem_of_model()
        if problem is not None:
            raise damaged(self.path, INDEX_NAME, problem)

    def _problem_of_model(self) -> str | None:
        try:
            model = saved_model(self.extra)
        except UserError as error:
            return f"says that its model is none: {error}"
        held = sum(map(math.prod, self.shapes.values()))
        if model is None or model.trained_parameter_count == held:
            return None
        return f"has {held:,} parameters, and the model that it names has another number"

    def check_coverage(self) -> None:
        """Check that every element of every kind of every parameter is stored exactly once.

        Raises:
            DamagedCheckpoint: a gap or an overlap.
        """
        wanted = {
            (name, kind): math.prod(shape)
            for kind in self.kinds
            for name, shape in self.own_shapes.get(kind, self.shapes).items()
        }
        ranges = [entry for file in self.files for entry in file.ranges]
        if (problem := uncovered(ranges, wanted)) is not None:
            raise damaged(self.path, INDEX_NAME, problem)

    def missing_state(self) -> str | None:
        """Return the first missing state or counter, or None.

        `check_coverage` compares ranges with `kinds` and `shapes`; this compares those with the
        states of the optimizer in the saver's config, independently of the engine.
        """
        config = self.extra.get("config", {})
        if config.get("optimizer") not in OPTIMIZERS:
            return None
        choice = OptimChoice(optimizer=config["optimizer"], momentum=config.get("momentum", 0))
        for name, shape in self.shapes.items():
            for kind in (PARAM, *states_of(choice, name, shape)):
                if kind not in self.kinds or name not in self.own_shapes.get(kind, self.shapes):
                    return f"has no {kind} of {name}"
        for counter in checkpointed(choice, self.shapes)[1]:
            if counter not in self.counters:
                return f"has no counter {counter} of the optimizer"
        return None

    def check_sizes(self) -> None:
        """Check that all rank files have their full length, and ranges lie inside them.

        Raises:
            DamagedCheckpoint: a file is missing or has another length.
        """
        for file in self.files:
            # A damaged or foreign index must not make a reader open files beyond its folder.
            if Path(file.name).name != file.name:
                raise damaged(self.path, INDEX_NAME, f"names a file elsewhere, {file.name!r}")
            size_bytes = file_size_bytes(self.path, file.name)
            if size_bytes != file.size_bytes:
                raise damaged(
                    self.path,
                    file.name,
                    f"has {size_bytes:,} bytes where {file.size_bytes:,} were written",
                )
            for entry in file.ranges:
                end = entry.offset_bytes + element_bytes(entry.kind) * entry.numel
                chunks = -(-entry.numel // CHUNK_ELEMENTS)
                inside = file.header_bytes <= entry.offset_bytes <= end <= size_bytes
                if not inside or chunks != len(entry.checksums):
                    raise damaged(self.path, INDEX_NAME, f"places {entry.name} outside {file.name}")

    def check_model(
        self, shapes: Mapping[str, tuple[int, ...]], kinds: Sequence[str], counters: Sequence[str]
    ) -> None:
        """Check that the state to be loaded has the same parameters and optimizer states.

        It may have more positions than were saved; further ones keep their initial values.

        Raises:
            UserError: it is another model or another optimizer.
        """
        for name in sorted({*shapes, *self.shapes}):
            here, there = shapes.get(name), self.shapes.get(name)
            longer = (
                name == _POSITIONS and here and there and (here[1:] == there[1:] and here > there)
            )
            if here != there and not longer:
                raise UserError(
                    f"checkpoint {self.path}: {name} is {_shape(there)} there and {_shape(here)} "
                    "in this run's model; give the same model flags as for the run that saved it"
                )
        if sorted(kinds) != sorted(self.kinds) or sorted(counters) != sorted(self.counters):
            raise UserError(
                f"checkpoint {self.path}: holds optimizer states {_states(self.kinds)} and this "
                f"run's optimizer has {_states(kinds)}; use the optimizer of the run that saved "
                "it, or --init-from in place of --resume to begin with a new one"
            )

    def check_own_shapes(self, own_shapes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> None:
        """Check the shapes of optimizer states that differ from their parameter's.

        Raises:
            UserError: the same optimizer with another option, such as APOLLO's rank.
        """
        for kind, shapes in own_shapes.items():
            saved = self.own_shapes.get(kind, self.shapes)
            for name, here in shapes.items():
                if name != _POSITIONS and (there := saved.get(name)) != here:
                    raise UserError(
                        f"checkpoint {self.path}: {kind} of {name} is {_shape(there)} there and "
                        f"{_shape(here)} in this run; give the optimizer's flags as for the run "
                        "that saved it"
                    )


def element_bytes(kind: str) -> int:
    """Return the size of a stored element; masks are stored as bytes of 8 bits."""
    return 1 if kind == MASK else ELEMENT_BYTES


def _plain(value: Any) -> dict[str, Any]:
    """Convert a record for JSON, leaving out the gaps that a range does not have."""
    if not isinstance(value, RankFile):
        return dataclasses.asdict(value)
    return dataclasses.asdict(
        value, dict_factory=lambda items: {name: item for name, item in items if item is not None}
    )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else "[" + ", ".join(map(str, shape)) + "]"


def _states(kinds: Sequence[str]) -> str:
    return ", ".join(kind for kind in sorted(kinds) if kind != PARAM) or "none"
