"""Check a run folder's content against the schema; values of other types are left out.

Files are truncated by full disks and edited by hand, and one bad value must not fail a report of
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
from launcher.util.json_file import Record

KINDS: dict[str, type[Record]] = {
    kind.kind: kind for kind in (*vars(records).values(), Ledger) if hasattr(kind, "kind")
}
# Larger values are damage: no count, size or loss reaches them, and floats hold no larger integers.
LARGEST = {int: 2**53, float: 1e300}


def sound_record(line: str) -> dict[str, Any] | None:
    """Parse a line of a rank file; None if it is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    record = with_current_names(record)
    kind = KINDS.get(record["kind"])  # kinds of newer versions are passed through
    return record if kind is None or fits(record, kind) else None


def with_current_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """Rename fields of earlier versions."""
    return {old_names.RENAMED.get(name, name): value for name, value in record.items()}


def fits(record: Mapping[str, Any], kind: type) -> bool:
    """Check that a JSON mapping fits a dataclass; missing fields count as None."""
    for name, expected in _fields(kind):
        value = record.get(name)
        if isinstance(expected, type):
            if not (isinstance(value, Mapping) and fits(value, expected)):
                return False
        elif not _is_one_of(value, expected):
            return False
    return True


def is_a(value: Any, kind: Any) -> bool:
    """Check a JSON or YAML value against an annotated plain type."""
    return _is_one_of(value, _types_of(kind))


def sound_fields(content: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Select the entries that the schema names and whose values have its types."""
    content = with_current_names(content)
    return {
        name: content[name]
        for name, kind in schema.items()
        if content.get(name) is not None and is_a(content[name], kind)
    }


def _is_one_of(value: Any, expected: frozenset[type]) -> bool:
    found = type(value)
    # Also False for NaN.
    return found in expected and (found not in LARGEST or abs(value) < LARGEST[found])


@cache
def _fields(kind: type) -> list[tuple[str, type | frozenset[type]]]:
    """List fields with their nested dataclass, or the types that their values may have."""
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
    """Return the types that JSON may have for an annotation."""
    if typing.get_origin(kind) is types.UnionType:
        return frozenset().union(*map(_types_of, typing.get_args(kind)))
    if kind is float:  # non-finite floats are written as null
        return frozenset((float, int, types.NoneType))
    if typing.get_origin(kind) is typing.Literal:
        return frozenset(map(type, typing.get_args(kind)))
    return frozenset((typing.get_origin(kind) or kind,))
