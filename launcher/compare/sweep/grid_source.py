"""Options of a sweep, and its grid from the command line or a YAML file.

    base: {model: gpt2, steps: 50}        # for all cells
    grid: {strategy: [ddp, zero2], micro_batch: [8, 16]}
    cells:                                # explicit rows, each combined with the grid
      - {name: best, strategy: zero3+cpu, micro_batch: 32}
      - {name: later, attention: flash, unavailable: needs --attention flash}

Each key and value is checked alone here, before it is combined with others.
"""

import argparse
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from launcher.config.arguments import parse_run_config
from launcher.config.sharding import Offload
from launcher.config.yaml_file import read_yaml
from launcher.strategies import STRATEGIES, VARIANTS
from launcher.util.errors import UserError, naming
from launcher.util.flags import (
    MOST_RANKS,
    YEAR_S,
    OptionParser,
    flag,
    is_number,
    require_range,
    split_options,
    usable_path,
)

SHIPPED = Path(__file__).parent / "grids"
# Labels of variants, and names of strategies (`zero` if another axis sets the stage).
SHARDINGS = tuple(dict.fromkeys((*VARIANTS, *STRATEGIES)))
OFFLOAD_TO = get_args(Offload)[1:]
GRID_FILE_KEYS = ("base", "grid", "cells")
# Set by the sweep itself for each cell.
OURS = ("out",)
SHORTEST_MINUTES = 0.001

Values = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepGrid:
    """Settings to vary: `rows` times every combination of `axes`, on top of `base`."""

    base: Values = field(default_factory=dict)
    axes: dict[str, list[Any]] = field(default_factory=dict)
    rows: list[Values] = field(default_factory=list)


def _parser() -> OptionParser:
    parser = OptionParser(
        prog="shardscale sweep",
        description="Run one training per combination of the grid's values, in sequence, each in "
        "processes of its own. Cells that run out of memory, fail or time out are recorded as "
        "such. A rerun on the same --out executes only unfinished cells.",
        epilog="All other flags are launcher.train's and apply to every cell: --model gpt2 "
        "--steps 50. See `shardscale train --help`.",
    )
    add = parser.add_argument
    add("--nproc", type=int, help="processes per cell (default: one per GPU, at least 1)")
    add(
        "--grid",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE,VALUE",
        help="values to vary, by the names of launcher.train's flags; strategy also takes "
        f"{', '.join(name for name in VARIANTS if name not in STRATEGIES)}, and a suffix +cpu "
        "for offload",
    )
    add(
        "--grid-file", metavar="FILE", help=f"YAML grid, or the name of a shipped one: {_shipped()}"
    )
    out = Path("sweeps", datetime.datetime.now().strftime("%Y%m%d-%H%M%S"))
    add("--out", type=Path, default=out, help="the sweep's folder (default: sweeps/TIME)")
    add(
        "--timeout-minutes",
        type=float,
        default=60.0,
        help="stop a cell after this time (default: 60)",
    )
    add(
        "--prepare",
        action="store_true",
        help="check and write the sweep without running it; --cell runs it, on any machine",
    )
    add(
        "--cell",
        type=int,
        metavar="NUMBER",
        help="run this cell of a prepared --out, counted from 0",
    )
    return parser


def parse_options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the arguments into the sweep's own options and flags of `launcher.train`.

    Raises:
        UserError: an option's value is invalid.
    """
    options, training = split_options(_parser(), argv)
    require_range("--nproc", options.nproc, 1, MOST_RANKS)
    require_range("--timeout-minutes", options.timeout_minutes, SHORTEST_MINUTES, YEAR_S // 60)
    return options, training


def grid_of(options: argparse.Namespace, configured: Values) -> SweepGrid:
    """Combine the grids of file and command line with the values of `--config`.

    Raises:
        UserError: neither is given, or one contradicts the other.
    """
    if not options.grid and not options.grid_file:
        raise UserError(
            "nothing to compare: give --grid strategy=ddp,zero2 or --grid-file sharding"
        )
    axes = parse_axes(options.grid)
    grid = read_grid_file(options.grid_file) if options.grid_file else SweepGrid()
    for key in axes:
        if any(key in row for row in grid.rows):
            raise UserError(f"--grid {key}: the cells of {options.grid_file} already set it")
    return SweepGrid(base={**grid.base, **configured}, axes={**grid.axes, **axes}, rows=grid.rows)


def parse_axes(tokens: Sequence[str]) -> dict[str, list[Any]]:
    """Parse `["strategy=ddp,zero2", "micro_batch=8,16"]` into key -> values.

    Raises:
        UserError: not KEY=VALUE,VALUE, an unknown key or value, or a duplicate.
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


def read_grid_file(name: str) -> SweepGrid:
    """Read a YAML grid: a file, or a shipped one by its name (`seed`, `sharding`).

    Raises:
        UserError: no such file, not a grid, an unknown key or value.
    """
    with naming("--grid-file"):
        path = usable_path(name)
    if not path.exists() and (SHIPPED / f"{path.stem}.yaml").exists() and path.parent == Path():
        path = SHIPPED / f"{path.stem}.yaml"
    where = f"--grid-file {name}"
    if not path.exists():
        raise UserError(f"{where}: there is no such file; shipped grids are {_shipped()}")
    with naming(f"{where}:"):
        read = read_yaml(path)
    content = _mapping(where, read)
    for key in content:
        if key not in GRID_FILE_KEYS:
            raise UserError(f"{where}: unknown key {key!r}, use {', '.join(GRID_FILE_KEYS)}")
    base = _mapping(f"{where}: base", content.get("base"))
    axes = {
        key: list(values) if isinstance(values, list) else [values]
        for key, values in _mapping(f"{where}: grid", content.get("grid")).items()
    }
    rows = content.get("cells") or []
    if not isinstance(rows, list):
        raise UserError(f"{where}: cells is {rows!r:.40}, but must be a list of `- key: value`")
    rows = [_mapping(f"{where}: cells", row) for row in rows]
    for key, value in base.items():
        _check_axis(f"{where}: base", key, [value])
    for key, values in axes.items():
        if not values:
            raise UserError(f"{where}: grid: {key} has no values: give one")
        _check_axis(f"{where}: grid", key, values)
    for row in rows:
        for key, value in row.items():
            if key not in ("name", "unavailable") and "unavailable" not in row:
                _check_axis(f"{where}: cells", key, [value])
    return SweepGrid(base=base, axes=axes, rows=rows)


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """Format flat values as flags of `launcher.train`."""
    tokens: list[str] = []
    for key, value in values.items():
        if isinstance(value, bool):
            tokens.append(flag(key) if value else "--no-" + flag(key)[2:])
        elif isinstance(value, list | tuple):
            tokens += [flag(key), *map(str, value)]
        else:
            tokens.append(f"{flag(key)}={value}")
    return tokens


def _shipped() -> str:
    return ", ".join(sorted(path.stem for path in SHIPPED.glob("*.yaml")))


def _check_axis(where: str, key: Any, values: Sequence[Any]) -> None:
    """Refuse a key or value that is invalid in any combination."""
    if key in OURS:
        raise UserError(f"{where}: {key} is not for a grid, each cell has its own run folder")
    seen: set[str | float] = set()
    for value in map(str, values):
        same = float(value) if is_number(value, float) else value  # 1e-3 is 0.001
        if same in seen:
            raise UserError(f"{where} {key}: {value} is given twice, leave one out")
        seen.add(same)
    for value in values:
        with naming(f"{where} {key}={value}:"):
            _check_value(str(key), value)


def _check_value(key: str, value: Any) -> None:
    if key == "strategy":
        name, plus, target = str(value).partition("+")
        if name not in SHARDINGS or (plus and target not in OFFLOAD_TO):
            raise UserError(
                f"use one of {', '.join(SHARDINGS)}; the suffix +cpu offloads, as in zero3+cpu"
            )
    else:
        config = parse_run_config(flags_of({key: value}))
        if key == "model":
            config.model.build()


def _mapping(where: str, value: Any) -> Values:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{where} holds {value!r:.40}, but must hold lines of `key: value`")
    return {str(key).replace("-", "_"): item for key, item in value.items()}
