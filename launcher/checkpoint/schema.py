"""JSON that anybody may have written, as one of our own types, or refused in one sentence."""

import functools
import reprlib
from collections.abc import Hashable
from typing import Annotated, Any, TypeVar, cast

from annotated_types import Interval

T = TypeVar("T")

Count = Annotated[int, Interval(ge=0, le=2**53)]
"""0 or more, and no more than every reader of JSON keeps exactly."""

_WORDS = (("Input should be", "must be"), ("Value error, ", ""), ("Input should", "it should"))


def strictly(kind: type[T], text: str) -> T:
    """The JSON `text` as a `kind`, every value of exactly the type that is declared.

    Raises:
        ValueError: it is something else; says what and where.
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
    for theirs, ours in _WORDS:
        what = what.replace(theirs, ours)
    raise ValueError(f"says {where} is {reprlib.repr(first['input'])[:60]}, but {what[:90]}")


@functools.cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)  # takes a tenth of a second


def _shown(part: Any) -> str:
    """A step on the way to a value; keys are somebody's text."""
    text = str(part)
    return text if text.isidentifier() and len(text) < 40 else reprlib.repr(part)
