"""What all records of a run are: plain values under names, as one JSON object."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Base of all records; `kind` names the subclass in the file."""

    kind: ClassVar[str]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, `kind` first; NaN and infinity, which JSON lacks, become None."""
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
