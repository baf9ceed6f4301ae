"""`index.json`: what a checkpoint holds and where, in plain JSON that is checked before use."""

import dataclasses
import hashlib
import json
import reprlib
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from annotated_types import Interval, Len, MinLen, Predicate

from launcher.checkpoint.extra import Extra, saved_model
from launcher.checkpoint.rng import is_state
from launcher.checkpoint.schema import Count, strictly
from launcher.checkpoint.whole import what_is_missing
from launcher.errors import UserError
from launcher.strategies.flat_shards import PARAM, element_count

INDEX_NAME = "index.json"
FORMAT, VERSION = "shardscale-checkpoint", 1
_FORMATS = (FORMAT, "memscale-checkpoint")  # the same bytes, under the name before 0.2
_LARGEST_INDEX_BYTES = 2**30  # 1,024 ranks with ten thousand ranges each stay below
ELEMENT_BYTES = 4  # everything is stored as fp32
CHUNK_ELEMENTS = 2**20
"""Elements under one checksum, which is also the largest piece in memory at once: 4 MiB."""

Name = Annotated[str, Len(1, 255), Predicate(str.isprintable)]  # fits into a sentence
Positive = Annotated[int, Interval(ge=1, le=2**53)]
Checksum = Annotated[int, Interval(ge=0, lt=2**32)]
Shape = tuple[Positive, ...]


class DamagedCheckpoint(UserError):
    """A checkpoint is not what was written; another one may be taken instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Elements [start, start + numel) of a flattened tensor, at `offset_bytes` of a file.

    There is one CRC-32 for each `CHUNK_ELEMENTS` elements, so a part can be read and checked
    without the rest.
    """

    name: Name
    kind: Name
    start: Count
    numel: Positive
    offset_bytes: Count
    checksums: Sequence[Checksum]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFile:
    """A file that one rank wrote."""

    name: Name
    size_bytes: Positive
    header_bytes: Positive
    header_checksum: Checksum
    ranges: Sequence[Range]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """What `index.json` says. The types are its schema: what is read fits them exactly."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
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
        try:
            contents = strictly(Contents, _read_content(path))
        except ValueError as error:
            raise damaged(path, INDEX_NAME, str(error)) from None
        checkpoint = cls(
            path=path, **{f.name: getattr(contents, f.name) for f in dataclasses.fields(contents)}
        )
        checkpoint.check_agreement()
        checkpoint.check_coverage()
        checkpoint.check_sizes()
        if (missing := checkpoint.missing_state()) is not None:
            raise damaged(path, INDEX_NAME, missing)
        return checkpoint

    def write(self) -> None:
        """Write `index.json` into the folder."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(Contents)}
        content = json.loads(json.dumps(fields, default=dataclasses.asdict))
        document = {
            "format": FORMAT,
            "version": VERSION,
            "sha256": _digest(content),
            "content": content,
        }
        with (self.path / INDEX_NAME).open("x", encoding="utf-8") as file:
            json.dump(document, file)

    @property
    def size_bytes(self) -> int:
        """Bytes of all rank files."""
        return sum(file.size_bytes for file in self.files)

    def check_agreement(self) -> None:
        """What the index says in several places goes together.

        Raises:
            DamagedCheckpoint: it contradicts itself.
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
        held = sum(map(element_count, self.shapes.values()))
        if model is None or model.parameter_count == held:
            return None
        return f"has {held:,} parameters, and the model that it names has another number"

    def check_coverage(self) -> None:
        """Every element of every kind of every parameter is there exactly once.

        Raises:
            DamagedCheckpoint: a gap or an overlap.
        """
        ends: dict[tuple[str, str], int] = {}
        ranges = [entry for file in self.files for entry in file.ranges]
        for entry in sorted(ranges, key=lambda r: (r.name, r.kind, r.start)):
            key = (entry.name, entry.kind)
            if entry.start != ends.get(key, 0):
                word = "overlapping" if entry.start < ends.get(key, 0) else "missing"
                raise damaged(
                    self.path, INDEX_NAME, f"has {word} elements of {entry.name} ({entry.kind})"
                )
            ends[key] = entry.start + entry.numel
        wanted = {
            (name, kind): element_count(shape)
            for kind in self.kinds
            for name, shape in self.own_shapes.get(kind, self.shapes).items()
        }
        for name, kind in sorted(wanted.keys() | ends.keys()):
            if wanted.get((name, kind)) != ends.get((name, kind)):
                raise damaged(self.path, INDEX_NAME, f"does not cover {name} ({kind}) exactly")

    def missing_state(self) -> str | None:
        """What is not there of what the optimizer of the saver's config has, if anything."""
        return what_is_missing(
            shapes=self.shapes,
            kinds=self.kinds,
            own_shapes=self.own_shapes,
            counters=self.counters,
            config=self.extra.get("config", {}),
        )

    def check_sizes(self) -> None:
        """All rank files are there in full length, and ranges lie inside them.

        Raises:
            DamagedCheckpoint: a file is missing or has another length.
        """
        for file in self.files:
            if Path(file.name).name != file.name:
                raise damaged(self.path, INDEX_NAME, f"names a file elsewhere, {file.name!r}")
            size_bytes = _file_size_bytes(self.path, file.name)
            if size_bytes != file.size_bytes:
                raise damaged(
                    self.path,
                    file.name,
                    f"has {size_bytes:,} bytes where {file.size_bytes:,} were written",
                )
            for entry in file.ranges:
                end = entry.offset_bytes + ELEMENT_BYTES * entry.numel
                chunks = -(-entry.numel // CHUNK_ELEMENTS)
                inside = file.header_bytes <= entry.offset_bytes <= end <= size_bytes
                if not inside or chunks != len(entry.checksums):
                    raise damaged(self.path, INDEX_NAME, f"places {entry.name} outside {file.name}")

    def check_model(
        self, shapes: Mapping[str, tuple[int, ...]], kinds: Sequence[str], counters: Sequence[str]
    ) -> None:
        """The state that is to be filled has the same parameters and optimizer states.

        Raises:
            UserError: it is another model or another optimizer.
        """
        for name in sorted({*shapes, *self.shapes}):
            here, there = shapes.get(name), self.shapes.get(name)
            if here != there:
                raise UserError(
                    f"checkpoint {self.path}: {name} is {_shape(there)} there and {_shape(here)} "
                    "in this run's model; give the same model flags as for the run that saved it"
                )
        if sorted(kinds) != sorted(self.kinds) or sorted(counters) != sorted(self.counters):
            raise UserError(
                f"checkpoint {self.path}: holds optimizer states {_states(self.kinds)} and this "
                f"run's optimizer has {_states(kinds)}; use the optimizer of the run that saved it"
            )


def damaged(path: Path, file: str, what: str) -> DamagedCheckpoint:
    """The one sentence that names checkpoint, file and fault, and says what to do."""
    if not path.exists():
        return DamagedCheckpoint(
            f"checkpoint {path} is not there: never saved, or removed since, as a run with --keep "
            "does with older ones; take another checkpoint"
        )
    return DamagedCheckpoint(
        f"checkpoint {path} is damaged: {file} {what}; resume from another checkpoint"
    )


def _read_content(path: Path) -> str:
    """The content of the index as JSON, after its checksum was compared."""
    if _file_size_bytes(path, INDEX_NAME) > _LARGEST_INDEX_BYTES:
        raise damaged(path, INDEX_NAME, f"is larger than {_LARGEST_INDEX_BYTES:,} bytes")
    try:
        document = json.loads((path / INDEX_NAME).read_bytes())
    except OSError as error:
        raise damaged(path, INDEX_NAME, f"cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise damaged(path, INDEX_NAME, "is not valid JSON") from None
    if not isinstance(document, dict) or document.get("format") not in _FORMATS:
        raise damaged(path, INDEX_NAME, "is not the index of a shardscale checkpoint")
    version = document.get("version")
    if type(version) is not int:
        raise damaged(path, INDEX_NAME, f"has no version, but {reprlib.repr(version)}")
    if version != VERSION:
        raise UserError(
            f"checkpoint {path}: has format version {reprlib.repr(version)}, and this version "
            f"of shardscale reads {VERSION}; use the one that wrote it"
        )
    try:
        digest = _digest(document.get("content"))
    except RecursionError:
        raise damaged(path, INDEX_NAME, "is nested too deeply") from None
    if document.get("sha256") != digest:
        raise damaged(path, INDEX_NAME, "does not match its own checksum")
    return json.dumps(document["content"])


def _file_size_bytes(path: Path, name: str) -> int:
    try:
        found = (path / name).stat()
    except OSError as error:
        raise damaged(path, name, f"cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(found.st_mode):  # reading a pipe would wait for ever
        raise damaged(path, name, "is not a file")
    return found.st_size


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else "[" + ", ".join(map(str, shape)) + "]"


def _states(kinds: Sequence[str]) -> str:
    return ", ".join(kind for kind in sorted(kinds) if kind != PARAM) or "none"
