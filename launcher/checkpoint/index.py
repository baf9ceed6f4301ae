"""`index.json`: what a checkpoint holds and where, in plain JSON that is checked before use."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from launcher.checkpoint.whole import what_is_missing
from launcher.errors import UserError
from launcher.strategies.flat_shards import PARAM, OwnShapes, element_count

INDEX_NAME = "index.json"
FORMAT, VERSION = "shardscale-checkpoint", 1
_FORMATS = (FORMAT, "memscale-checkpoint")  # the same bytes, under the name before 0.2
ELEMENT_BYTES = 4  # everything is stored as fp32
CHUNK_ELEMENTS = 2**20
"""Elements under one checksum, which is also the largest piece in memory at once: 4 MiB."""


class DamagedCheckpoint(UserError):
    """A checkpoint is not what was written; another one may be taken instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Elements [start, start + numel) of a flattened tensor, at `offset_bytes` of a file.

    There is one CRC-32 for each `CHUNK_ELEMENTS` elements, so a part can be read and checked
    without the rest.
    """

    name: str
    kind: str
    start: int
    numel: int
    offset_bytes: int
    checksums: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFile:
    """A file that one rank wrote."""

    name: str
    size_bytes: int
    header_bytes: int
    header_checksum: int
    ranges: Sequence[Range]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """An index, read and checked: complete, and consistent with the sizes of its files."""

    path: Path
    step: int
    world_size: int
    shapes: Mapping[str, tuple[int, ...]]
    kinds: Sequence[str]
    counters: Mapping[str, float]
    extra: Mapping[str, Any]
    """Whatever the saver added, as JSON: config, strategy, data position."""
    rng: Sequence[Mapping[str, str]]
    """For each rank that saved: device type -> base64 of torch's generator state."""
    files: Sequence[RankFile]
    own_shapes: OwnShapes = field(default_factory=dict)
    """kind -> parameter -> shape, for kinds that are not of every parameter in its shape."""

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read the index of the checkpoint folder `path`; touches no tensor data.

        Raises:
            DamagedCheckpoint: something is missing, cut off, changed or does not fit together.
            UserError: written in another version of the format.
        """
        content = _read_content(path)
        try:
            files = [
                RankFile(**{**file, "ranges": [Range(**entry) for entry in file["ranges"]]})
                for file in content.pop("files")
            ]
            shapes = {name: tuple(shape) for name, shape in content.pop("shapes").items()}
            own_shapes = {
                kind: {name: tuple(shape) for name, shape in named.items()}
                for kind, named in content.pop("own_shapes", {}).items()
            }
            checkpoint = cls(
                path=path, files=files, shapes=shapes, own_shapes=own_shapes, **content
            )
            checkpoint.check_coverage()
            checkpoint.check_sizes()
            if (missing := checkpoint.missing_state()) is not None:
                raise damaged(path, INDEX_NAME, missing)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            why = f"has another structure than expected: {error}"
            raise damaged(path, INDEX_NAME, why) from None
        return checkpoint

    def write(self) -> None:
        """Write `index.json` into the folder."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del fields["path"]
        content = {**fields, "files": [dataclasses.asdict(file) for file in self.files]}
        content = json.loads(json.dumps(content))
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
            try:
                size_bytes = (self.path / file.name).stat().st_size
            except OSError as error:
                raise damaged(self.path, file.name, f"cannot be read ({error.strerror})") from None
            if size_bytes != file.size_bytes:
                raise damaged(
                    self.path,
                    file.name,
                    f"has {size_bytes:,} bytes where {file.size_bytes:,} were written",
                )
            for entry in file.ranges:
                end = entry.offset_bytes + ELEMENT_BYTES * entry.numel
                chunks = -(-entry.numel // CHUNK_ELEMENTS)
                if not 0 <= entry.offset_bytes <= end <= size_bytes or chunks != len(
                    entry.checksums
                ):
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
    return DamagedCheckpoint(
        f"checkpoint {path} is damaged: {file} {what}; resume from another checkpoint"
    )


def _read_content(path: Path) -> dict[str, Any]:
    try:
        document = json.loads((path / INDEX_NAME).read_bytes())
    except OSError as error:
        raise damaged(path, INDEX_NAME, f"cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise damaged(path, INDEX_NAME, "is not valid JSON") from None
    if not isinstance(document, dict) or document.get("format") not in _FORMATS:
        raise damaged(path, INDEX_NAME, "is not the index of a shardscale checkpoint")
    if document.get("version") != VERSION:
        raise UserError(
            f"checkpoint {path}: has format version {document.get('version')!r}, and this version "
            f"of shardscale reads {VERSION}; use the one that wrote it"
        )
    content = document.get("content")
    if not isinstance(content, dict) or document.get("sha256") != _digest(content):
        raise damaged(path, INDEX_NAME, "does not match its own checksum")
    return content


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else "[" + ", ".join(map(str, shape)) + "]"


def _states(kinds: Sequence[str]) -> str:
    return ", ".join(kind for kind in sorted(kinds) if kind != PARAM) or "none"
