"""`shardscale plan --rent`: rank GPUs and their number by what a training costs on them."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from launcher.tools.rent.prices import OWN
from launcher.util.errors import UserError, refusing
from launcher.util.flags import OptionParser, require_range, split_options
from launcher.util.startup import loading

MOST_TOKENS: Final = 1e18
MOST_HOURS: Final = 1e6


@refusing
def main(argv: Sequence[str]) -> int:
    """Plan on each offer and print them by cost; returns an exit code."""
    options, rest = parse(argv)
    with loading():
        from launcher.tools.rent.rentals import print_rentals

    return print_rentals(options, rest)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the arguments into the options of this verb and those of a plan.

    Raises:
        UserError: an option's value is invalid, or there are no tokens.
    """
    parser = OptionParser(
        prog="shardscale plan",
        usage="shardscale plan --rent --tokens N --model NAME [options] [flags of launcher.train]",
        description="Rank GPUs and their number by what a training of so many tokens costs.",
        epilog="--gpu NAME and --gpus N look at one kind and one number only.",
    )
    add = parser.add_argument
    add("--rent", action="store_true", help="rank what can be rented")
    add("--tokens", type=float, metavar="N", help="tokens to train on, as 2e9")
    add("--deadline-hours", type=float, metavar="H", help="leave out what takes longer")
    add("--prices", type=Path, metavar="FILE", help=f"prices (default: {OWN.name}, with its date)")
    add("--json", action="store_true", help="print JSON")
    options, rest = split_options(parser, argv)
    if options.tokens is None:
        raise UserError("--rent needs the tokens to train on: give --tokens 2e9")
    require_range("--tokens", options.tokens, 1, MOST_TOKENS)
    require_range("--deadline-hours", options.deadline_hours, 0, MOST_HOURS)
    return options, rest
