"""The command line of `shardscale sweep`, and the grid that it stands for."""

import argparse
import datetime
from collections.abc import Sequence
from pathlib import Path

from launcher.compare.sweep.grid_source import SHIPPED, Grid, Values, parse_axes, read_grid_file
from launcher.errors import UserError
from launcher.flags import MOST_RANKS, YEAR_S, OptionParser, require_range, split_options

SHORTEST_MINUTES = 0.001


def _parser() -> OptionParser:
    shipped = ", ".join(sorted(path.stem for path in SHIPPED.glob("*.yaml")))
    parser = OptionParser(
        prog="shardscale sweep",
        description="One training run per combination of the grid's values, one after the other, "
        "each in processes of its own. A cell that runs out of memory, fails or times out is a "
        "row like any other. Started again on the same --out, it runs what is not done.",
        epilog="Every other flag is launcher.train's and applies to all cells: --model gpt2 "
        "--steps 50. See `shardscale train --help`.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nproc", type=int, help="processes of each cell (default: one per GPU, at least 1)")
    add(
        *("--grid",),
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE,VALUE",
        help="what to vary, by the names of launcher.train's flags; strategy also takes zero0 to "
        "zero3, fsdp-grad-op, fsdp-hybrid, and +cpu behind a name for offload",
    )
    add("--grid-file", metavar="FILE", help=f"a YAML grid, or a shipped one: {shipped}")
    add("--out", type=Path, help="the sweep's folder (default: sweeps/TIME)")
    add(
        *("--timeout-minutes",),
        type=float,
        default=60.0,
        help="a cell that takes longer is stopped (default: 60)",
    )
    add(
        *("--prepare",),
        action="store_true",
        help="check and write the sweep, and run none of it: --cell does, on other machines",
    )
    add("--cell", type=int, metavar="NUMBER", help="run this one of a prepared --out, from 0 on")
    return parser


def parse_options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The sweep's own options, and the flags that are `launcher.train`'s.

    Raises:
        UserError: an option's value is invalid.
    """
    options, training = split_options(_parser(), argv)
    require_range("--nproc", options.nproc, 1, MOST_RANKS)
    require_range("--timeout-minutes", options.timeout_minutes, SHORTEST_MINUTES, YEAR_S // 60)
    return options, training


def default_folder() -> Path:
    """sweeps/TIME."""
    return Path("sweeps") / datetime.datetime.now().strftime("%Y%m%d-%H%M%S")


def grid_of(options: argparse.Namespace, configured: Values) -> Grid:
    """The grid of the file and of the command line, on top of what `--config` says.

    Raises:
        UserError: neither is given, or one contradicts the other.
    """
    if not options.grid and not options.grid_file:
        raise UserError(
            "nothing to compare: give --grid strategy=ddp,zero2 or --grid-file sharding"
        )
    axes = parse_axes(options.grid)
    grid = read_grid_file(options.grid_file) if options.grid_file else Grid()
    for key in axes:
        if any(key in row for row in grid.rows):
            raise UserError(f"--grid {key}: the cells of {options.grid_file} set it themselves")
    return Grid(base={**grid.base, **configured}, axes={**grid.axes, **axes}, rows=grid.rows)
