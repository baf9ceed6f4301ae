"""Where a grid comes from: `KEY=VALUE,VALUE` on the command line, or a YAML file.

    base: {model: gpt2, steps: 50}        # for all cells
    grid: {strategy: [ddp, zero2], micro_batch: [8, 16]}
    cells:                                # rows as they are, each times the grid
      - {name: best, strategy: zero3+cpu, micro_batch: 32}
      - {name: later, attention: flash, unavailable: needs --attention flash}

Each key and value is checked by itself here, before it is combined with others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from launcher.config.arguments import parse_run_config
from launcher.config.schema import ModelChoice, Offload
from launcher.config.yaml_file import read_yaml
from launcher.errors import UserError
from launcher.flags import flag, usable_path
from launcher.strategies import VARIANTS

SHIPPED = Path(__file__).parent / "grids"
SHARDINGS = (*VARIANTS, "zero")  # `zero` where another axis sets the stage
OFFLOAD_TO = get_args(Offload)[1:]
GRID_FILE_KEYS = ("base", "grid", "cells")
# What the sweep itself decides for each cell.
OURS = ("out",)

Values = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """What to vary: `rows` (as they are) times every combination of `axes`, on top of `base`."""

    base: Values = field(default_factory=dict)
    axes: dict[str, list[Any]] = field(default_factory=dict)
    rows: list[Values] = field(default_factory=list)


def parse_axes(tokens: Sequence[str]) -> dict[str, list[Any]]:
    """`["strategy=ddp,zero2", "micro_batch=8,16"]` -> key -> values.

    Raises:
        UserError: not KEY=VALUE,VALUE, an unknown key or value, or one that is given twice.
    """
    axes: dict[str, list[Any]] = {}
    for token in tokens:
        key, equals, text = token.partition("=")
        key = key.replace("-", "_")
        if not equals or not text:
            raise UserError(f"--grid {token}: write KEY=VALUE,VALUE, as in strategy=ddp,zero2")
        if key in axes:
            raise UserError(f"--grid {key} is given twice: put its values into one list")
        axes[key] = text.split(",")
        _check_axis("--grid", key, axes[key])
    return axes


def read_grid_file(name: str) -> Grid:
    """Read a YAML grid: a file, or a shipped one by its name (`seed`, `sharding`).

    Raises:
        UserError: no such file, not a grid, an unknown key or value.
    """
    try:
        path = usable_path(name)
    except UserError as error:
        raise UserError(f"--grid-file {error}") from None
    if not path.exists() and (SHIPPED / f"{path.stem}.yaml").exists() and path.parent == Path():
        path = SHIPPED / f"{path.stem}.yaml"
    said = f"--grid-file {name}"
    content = _mapping(said, _read_yaml(said, path))
    for key in content:
        if key not in GRID_FILE_KEYS:
            raise UserError(f"{said}: unknown key {key!r}, use {', '.join(GRID_FILE_KEYS)}")
    base = _mapping(f"{said}: base", content.get("base"))
    axes = {
        key: list(values) if isinstance(values, list) else [values]
        for key, values in _mapping(f"{said}: grid", content.get("grid")).items()
    }
    rows = content.get("cells") or []
    if not isinstance(rows, list):
        raise UserError(f"{said}: cells is {rows!r:.40}, but must be a list of `- key: value`")
    rows = [_mapping(f"{said}: cells", row) for row in rows]
    for key, value in base.items():
        _check_axis(f"{said}: base", key, [value])
    for key, values in axes.items():
        if not values:
            raise UserError(f"{said}: grid: {key} has no values, so there is no cell: give one")
        _check_axis(f"{said}: grid", key, values)
    for row in rows:
        for key, value in row.items():
            if key not in ("name", "unavailable") and "unavailable" not in row:
                _check_axis(f"{said}: cells", key, [value])
    return Grid(base=base, axes=axes, rows=rows)


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """Flat values as the flags of `launcher.train`."""
    tokens: list[str] = []
    for key, value in values.items():
        if isinstance(value, bool):
            tokens.append(flag(key) if value else "--no-" + flag(key)[2:])
        elif isinstance(value, list | tuple):
            tokens += [flag(key), *map(str, value)]
        else:
            tokens.append(f"{flag(key)}={value}")
    return tokens


def _check_axis(said: str, key: Any, values: Sequence[Any]) -> None:
    """Refuse a key or value that is wrong by itself, whatever it is combined with."""
    if key in OURS:
        raise UserError(f"{said}: {key} is not for a grid, each cell has its own run folder")
    seen = set()
    for value in map(str, values):
        if value in seen:
            raise UserError(f"{said} {key}: {value} is given twice, leave one out")
        seen.add(value)
    for value in values:
        try:
            _check_value(str(key), value)
        except UserError as error:
            raise UserError(f"{said} {key}={value}: {error}") from None


def _check_value(key: str, value: Any) -> None:
    if key == "strategy":
        name, plus, target = str(value).partition("+")
        if name not in SHARDINGS or (plus and target not in OFFLOAD_TO):
            raise UserError(
                f"use one of {', '.join(SHARDINGS)}; +cpu behind it offloads, as in zero3+cpu"
            )
    elif key == "model":
        ModelChoice(model=str(value)).build()
    else:
        parse_run_config(flags_of({key: value}))


def _read_yaml(said: str, path: Path) -> Any:
    if not path.exists():
        names = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.yaml")))
        raise UserError(f"{said}: there is no such file; shipped grids are {names}")
    try:
        return read_yaml(path)
    except UserError as error:
        raise UserError(f"{said}: {error}") from None


def _mapping(said: str, value: Any) -> Values:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{said} holds {value!r:.40}, but must hold lines of `key: value`")
    return {str(key).replace("-", "_"): item for key, item in value.items()}
