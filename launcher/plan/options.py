"""The command line of `shardscale plan`: its own options, and launcher.train's flags."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from launcher.errors import UserError
from launcher.flags import OptionParser, split_options
from launcher.measure.hardware import GPUS
from launcher.sizes import parse_bytes

GOALS = ("fastest", "least-memory", "largest-batch", "largest-model")


def _parser() -> OptionParser:
    parser = OptionParser(
        prog="shardscale plan",
        description="Predict bytes and seconds of every way to train a model on so many GPUs, "
        "without one, and print the command for the best.",
        epilog="Every other flag is launcher.train's: --model gpt2-xl --global-batch 128. One that "
        "is given is not varied: --precision bf16 --zero 3. See `shardscale train --help`.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    known = ", ".join(gpu.name for gpu in GPUS)
    add("--gpus", type=int, default=1, metavar="N", help="how many in all (default: 1)")
    add("--gpus-per-node", type=int, metavar="N", help="of them in one machine (default: up to 8)")
    add("--gpu", metavar="NAME", help=f"one of {known}")
    add("--gpu-memory", metavar="SIZE", help="memory of each, 24GiB (default: what the GPU has)")
    add("--profile", type=Path, metavar="FILE", help="rates that `shardscale profile` has measured")
    add("--goal", choices=GOALS, default=GOALS[0], help="what is best (default: fastest)")
    add("--price-per-gpu-hour", type=float, metavar="PRICE", help="adds what a million tokens cost")
    add("--quiet", action="store_true", help="no progress while it is planned")
    add("--all", action="store_true", help="show every choice, not only the best of each sharding")
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=Path("-"),
        metavar="FILE",
        help="write every prediction there; without FILE, show them instead of the table",
    )
    add("--page", type=Path, metavar="FILE.html", help="write a page with bars of bytes there")
    add("--apply", type=Path, metavar="FILE.yaml", help="write the best one's config there")
    add(
        *("--no-calibration",),
        action="store_true",
        help="leave out the constants learnt from runs on this machine",
    )
    return parser


def parse_options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The plan's own options, and the flags that are `launcher.train`'s.

    Raises:
        UserError: an option's value is invalid.
    """
    options, training = split_options(_parser(), argv)
    for name, value in (("--gpus", options.gpus), ("--gpus-per-node", options.gpus_per_node)):
        if value is not None and not 1 <= value <= 2**20:
            raise UserError(f"{name} {value} must be at least 1 and at most {2**20}")
    if options.price_per_gpu_hour is not None and not 0 <= options.price_per_gpu_hour < 1e9:
        raise UserError(f"--price-per-gpu-hour {options.price_per_gpu_hour} must be 0 or more")
    if options.gpu is not None and options.profile is not None:
        raise UserError(f"--gpu {options.gpu} and --profile {options.profile}: give one of them")
    if options.gpu_memory is not None:
        parse_bytes(options.gpu_memory, "--gpu-memory")
    for path in (options.json, options.page, options.apply):
        if path is not None and str(path) != "-" and path.exists():
            raise UserError(f"{path}: already exists, and nothing is overwritten: choose another")
    return options, training
