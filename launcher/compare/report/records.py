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

from launcher.measure import records
from launcher.memory.ledger import Ledger
from launcher.record import Record

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
    kind = KINDS.get(record["kind"])  # a kind of a newer version is nobody's business here
    return record if kind is None or fits(record, kind) else None


def fits(value: Any, kind: Any) -> bool:
    """Whether a value out of JSON is of the annotated type; what is missing is None."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return isinstance(value, Mapping) and all(
            fits(value.get(name), expected)
            for name, (expected, optional) in _field_types(kind).items()
            if name in value or not optional
        )
    found = type(value)
    in_range = found not in LARGEST or abs(value) < LARGEST[found]  # which NaN is not
    return found in _plain_types(kind) and in_range


def sound_fields(content: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that the schema names and whose values fit it."""
    return {
        name: content[name]
        for name, kind in schema.items()
        if content.get(name) is not None and fits(content[name], kind)
    }


@cache
def _field_types(kind: type) -> dict[str, tuple[Any, bool]]:
    """Field -> its type, and whether it may be missing."""
    hints = typing.get_type_hints(kind)
    return {
        field.name: (hints[field.name], field.default is not dataclasses.MISSING)
        for field in dataclasses.fields(kind)
    }


@cache
def _plain_types(kind: Any) -> frozenset[type]:
    """What JSON may have in its place."""
    if typing.get_origin(kind) is types.UnionType:
        return frozenset().union(*map(_plain_types, typing.get_args(kind)))
    if kind is float:  # one that is not finite is written as null
        return frozenset((float, int, types.NoneType))
    return frozenset((typing.get_origin(kind) or kind,))
