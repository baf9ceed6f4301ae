"""Known shapes: configs of transformers by what people call them, from one file of data.

A line of shapes.jsonl has the name, the model's page on the hub, further names of it (`also`), its
published number of parameters, the source of the figures, and the fields of its config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

_DATA: Final = Path(__file__).with_name("shapes.jsonl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A line of the data."""

    name: str
    hub: str
    """ORG/NAME on the hub."""
    parameters: str
    """All parameters as published, such as 9.24B."""
    source: str
    """Where its figures were read."""
    config: Mapping[str, Any]
    """Its config.json, without what changes nothing."""
    also: tuple[str, ...] = ()
    """Further names on the hub."""


@cache
def known_shapes() -> Mapping[str, Shape]:
    """Return all known shapes by name; the browser's planner, without transformers, has none."""
    if not _DATA.exists():
        return {}
    lines = _DATA.read_text("utf-8").splitlines()
    return {shape.name: shape for shape in (Shape(**json.loads(line)) for line in lines)}
