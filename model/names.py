"""Names of decoders, from one file of data.

A line of names.jsonl is a name: the model's page on the hub, further names of it (`also`), its
published number of parameters, the source of the figures, and its shape, either as fields of
ModelConfig (`sizes`) or as the fields of a config.json of transformers (`config`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

DATA: Final = Path(__file__).with_name("names.jsonl")


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownName:
    """A line of the data."""

    name: str
    parameters: str
    """All parameters as published, such as 9.24B."""
    source: str
    """Where its figures were read."""
    hub: str = ""
    """ORG/NAME on the hub."""
    also: tuple[str, ...] = ()
    """Further names of it."""
    sizes: Mapping[str, Any] | None = None
    """Fields of ModelConfig, where shardscale's own decoder computes it."""
    config: Mapping[str, Any] | None = None
    """Its config.json, without what changes nothing."""


@cache
def known_names() -> Mapping[str, KnownName]:
    """Return all known names."""
    lines = DATA.read_text("utf-8").splitlines()
    return {known.name: known for known in (KnownName(**json.loads(line)) for line in lines)}


@cache
def known_configs() -> Mapping[str, Mapping[str, Any]]:
    """Return the config.json of each name that has one."""
    return {name: known.config for name, known in known_names().items() if known.config is not None}
