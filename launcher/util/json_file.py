"""JSON: files of other programs, read more strictly than Python does, and records as objects."""

import dataclasses
import functools
import json
import math
import reprlib
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

from launcher.util.errors import UserError
from launcher.util.flags import read_small_file

T = TypeVar("T")
JsonObject = dict[str, Any]
MOST_BYTES = 2**24  # an index of 100,000 tensors
MOST_DIGITS = 300
MOST_LEVELS = 20
_WORDS_OF_PYDANTIC = (
    ("Input should be", "must be"),
    ("Value error, ", ""),
    ("Input should", "it should"),
)
OF_TRANSFORMERS = "a file that save_pretrained of transformers or PEFT has written"


def read_json(
    path: Path,
    *,
    what: str = OF_TRANSFORMERS,
    most_bytes: int = MOST_BYTES,
    infinite: bool = False,
) -> JsonObject:
    """Read a file that holds one JSON object.

    A key that is given twice, NaN and Infinity are refused: the next program would read another
    value there.

    Args:
        what: the file to give instead, for the messages.
        infinite: take Infinity, which some files of transformers hold.

    Raises:
        UserError: missing, unreadable, no regular file, too large, not JSON, or not an object.
    """
    text = read_small_file(path, what=what, most_bytes=most_bytes)
    return parse_json(path, text, what=what, infinite=infinite)


def parse_json(path: Path, text: str, *, what: str, infinite: bool = False) -> JsonObject:
    """Parse the text of a file that holds one JSON object, as strictly as `read_json`; `path` names
    it in refusals.

    Raises:
        UserError: not JSON, or not an object.
    """
    try:
        content = json.loads(
            text,
            object_pairs_hook=partial(_object, infinite=infinite),
            parse_int=_whole_number,
        )
        if _levels(content) > MOST_LEVELS:
            raise RecursionError
    except RecursionError:
        raise UserError(
            f"{path}: nested too deep ({MOST_LEVELS} levels at most), give {what}"
        ) from None
    except json.JSONDecodeError as error:
        hint = " (comments are not JSON)" if error.doc[error.pos :][:1] in ("/", "#") else ""
        raise UserError(f"{path}: not valid JSON, give {what}: {error}{hint}") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds {brief(content)}, but must be a JSON object")
    return content


def json_object(path: Path) -> JsonObject:
    """Return the JSON object in a file; {} where there is none that can be read."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def strictly(kind: type[T], text: str) -> T:
    """Parse the JSON `text` as a `kind`, each value of exactly its declared type.

    Raises:
        ValueError: naming the first value that differs.
    """
    from pydantic import ValidationError

    try:
        checked: T = _adapter(cast(Hashable, kind)).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    else:
        return checked
    where = ".".join(_shown(part) for part in first["loc"] if part != "[key]") or "it"
    what = first["msg"]
    if first["type"] == "missing":
        raise ValueError(f"lacks {where}")
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        raise ValueError(f"has {where}, which is unknown")
    for theirs, ours in _WORDS_OF_PYDANTIC:
        what = what.replace(theirs, ours)
    raise ValueError(f"says {where} is {reprlib.repr(first['input'])[:60]}, but {what[:90]}")


@functools.cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)  # takes a tenth of a second


def _shown(part: Any) -> str:
    """Quote one part of a value's path; keys may be arbitrary text."""
    text = str(part)
    return text if text.isidentifier() and len(text) < 40 else reprlib.repr(part)


def brief(value: object, most: int = 40) -> str:
    """Return a value as JSON in a few printable characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _levels(content: Any) -> int:
    inner = content.values() if isinstance(content, dict) else content
    return 1 + max(map(_levels, inner), default=0) if isinstance(content, dict | list) else 0


def _object(pairs: list[tuple[str, Any]], *, infinite: bool) -> JsonObject:
    for key, value in pairs:
        _check_number(key, value, infinite)
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for number, key in enumerate(keys) if key in keys[:number])
        raise ValueError(f"the key {brief(twice)} is given twice in one object: remove one")
    return found


class _TooLong(str):
    """Digits of a number that would take seconds to parse."""


def _check_number(key: str, value: Any, infinite: bool) -> None:
    """Refuse numbers that Python reads and other programs do not: NaN, Infinity, 1e999."""
    if isinstance(value, list):
        for item in value:
            _check_number(key, item, infinite)
        return
    name = brief(key)[1:-1]
    if isinstance(value, _TooLong):
        raise ValueError(f"{name} is {value[:10]}..., of {len(value):,} digits: shorten it")
    if isinstance(value, float) and not (math.isfinite(value) or (infinite and value == value)):
        raise ValueError(f"{name} is {value}, which is no JSON number: write a number")


def _whole_number(digits: str) -> int | str:
    return _TooLong(digits) if len(digits) > MOST_DIGITS else int(digits)


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Base of all records; `kind` names the subclass in the file."""

    kind: ClassVar[str]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, `kind` first; NaN and infinity, which JSON lacks, become None."""
        return {"kind": self.kind} | _plain(self)


def _plain(record: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for known in dataclasses.fields(record):
        value = getattr(record, known.name)
        if dataclasses.is_dataclass(value):
            value = _plain(value)
        if isinstance(value, float) and not math.isfinite(value):
            value = None
        if value is not None or known.default is not None:
            values[known.name] = value
    return values
