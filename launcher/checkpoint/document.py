"""The envelope of `index.json`: format, version, checksum, and the errors of damaged files."""

import hashlib
import json
import reprlib
import stat
from pathlib import Path
from typing import Annotated, Any, TypeVar

from annotated_types import Interval

from launcher.config.old_names import with_bias
from launcher.util.errors import UserError
from launcher.util.json_file import strictly

T = TypeVar("T")

Count = Annotated[int, Interval(ge=0, le=2**53)]
"""0 or more, and no more than every reader of JSON keeps exactly."""
INDEX_NAME = "index.json"
FORMAT, VERSION = "shardscale-checkpoint", 2
_READABLE = (1, VERSION)  # in version 1, ranges had no gaps
_FORMATS = (FORMAT, "memscale-checkpoint")  # the same bytes, under the name before 0.2
_LARGEST_INDEX_BYTES = 2**30  # 1,024 ranks with ten thousand ranges each stay below


class DamagedCheckpoint(UserError):
    """A checkpoint differs from what was written; another one may be loaded instead."""


def damaged(path: Path, file: str, what: str) -> DamagedCheckpoint:
    """Return the error that names checkpoint, file, fault and remedy."""
    if not path.exists():
        return DamagedCheckpoint(
            f"checkpoint {path} is not there: never saved, or removed since, as a run with --keep "
            "does with older ones; take another checkpoint"
        )
    return DamagedCheckpoint(
        f"checkpoint {path} is damaged: {file} {what}; resume from another checkpoint"
    )


def read_document(path: Path, kind: type[T]) -> T:
    """Read the content of the index as a `kind`, after comparing its checksum."""
    if file_size_bytes(path, INDEX_NAME) > _LARGEST_INDEX_BYTES:
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
    if type(version) is not int:  # True == 1
        raise damaged(path, INDEX_NAME, f"has no version, but {reprlib.repr(version)}")
    if version not in _READABLE:
        raise UserError(
            f"checkpoint {path}: has format version {reprlib.repr(version)}, and this version "
            f"of shardscale reads {' and '.join(map(str, _READABLE))}; use the one that wrote it"
        )
    try:
        matches = document.get("sha256") == digest(document.get("content"))
    except RecursionError:
        raise damaged(path, INDEX_NAME, "is nested too deeply") from None
    if not matches:
        raise damaged(path, INDEX_NAME, "does not match its own checksum")
    try:
        return strictly(kind, json.dumps(_in_todays_names(document["content"])))
    except ValueError as error:
        raise damaged(path, INDEX_NAME, str(error)) from None


def _in_todays_names(content: Any) -> Any:
    extra = content.get("extra") if isinstance(content, dict) else None
    if isinstance(extra, dict) and isinstance(extra.get("model"), dict):
        return {**content, "extra": {**extra, "model": with_bias(extra["model"])}}
    return content


def write_document(path: Path, content: Any) -> None:
    """Write `index.json` into the folder `path`; `content` is plain JSON."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "sha256": digest(content),
        "content": content,
    }
    with (path / INDEX_NAME).open("x", encoding="utf-8") as file:
        json.dump(document, file)


def file_size_bytes(path: Path, name: str) -> int:
    """Return the size of a checkpoint's file, which must be a regular one."""
    try:
        found = (path / name).stat()
    except OSError as error:
        raise damaged(path, name, f"cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(found.st_mode):  # reading a pipe would block
        raise damaged(path, name, "is not a file")
    return found.st_size


def digest(content: Any) -> str:
    """Return the checksum of an index's content."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
