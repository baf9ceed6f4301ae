"""What a run folder says, held against the schema: what is of another type is damage, left out.

Files are cut off by full disks and edited by hand, and one bad value must not cost a report of
fifty runs.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

from launcher.config import old_names
from launcher.measure import records
from launcher.strategies.ledger import Ledger
from launcher.util.record import Record

KINDS: dict[str, type[Record]] = {
    kind.kind: kind for kind in (*vars(records).values(), Ledger) if hasattr(kind, "kind")
}
# Beyond these, no count, no size and no loss; and a float, or the page, holds no larger integer.
LARGEST = {int: 2**53, float: 1e300}


def sound_record(line: str) -> dict[str, Any] | None:
    """A line of a rank file as the record it is; None when it is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    record = with_names_of_today(record)
    kind = KINDS.get(record["kind"])  # a kind of a newer version is nobody's business here
    return record if kind is None or fits(record, kind) else None


def with_names_of_today(record: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping whose fields may have their names of an earlier version."""
    return {old_names.renamed(name): value for name, value in record.items()}


def fits(record: Mapping[str, Any], kind: type) -> bool:
    """Whether a mapping out of JSON has the fields of a dataclass; what is missing is None."""
    for name, expected in _fields(kind):
        value = record.get(name)
        if isinstance(expected, type):
            if not (isinstance(value, Mapping) and fits(value, expected)):
                return False
        elif not _is_one_of(value, expected):
            return False
    return True


def is_a(value: Any, kind: Any) -> bool:
    """Whether a value out of JSON or YAML is of the annotated plain type."""
    return _is_one_of(value, _types_of(kind))


def sound_fields(content: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that the schema names and whose values are of its types."""
    content = with_names_of_today(content)
    return {
        name: content[name]
        for name, kind in schema.items()
        if content.get(name) is not None and is_a(content[name], kind)
    }


def _is_one_of(value: Any, expected: frozenset[type]) -> bool:
    found = type(value)
    # NaN is below nothing.
    return found in expected and (found not in LARGEST or abs(value) < LARGEST[found])


@cache
def _fields(kind: type) -> list[tuple[str, type | frozenset[type]]]:
    """Field -> a dataclass of its own, or the types that its values may have."""
    hints = typing.get_type_hints(kind)
    expected: list[tuple[str, type | frozenset[type]]] = []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            expected.append((field.name, hint))
        else:
            optional = field.default is not dataclasses.MISSING
            expected.append((field.name, _types_of(hint | None if optional else hint)))
    return expected


@cache
def _types_of(kind: Any) -> frozenset[type]:
    """What JSON may have where the annotation is `kind`."""
    if typing.get_origin(kind) is types.UnionType:
        return frozenset().union(*map(_types_of, typing.get_args(kind)))
    if kind is float:  # one that is not finite is written as null
        return frozenset((float, int, types.NoneType))
    if typing.get_origin(kind) is typing.Literal:
        return frozenset(map(type, typing.get_args(kind)))
    return frozenset((typing.get_origin(kind) or kind,))
