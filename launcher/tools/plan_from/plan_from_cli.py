"""`shardscale plan --from FILE` and `plan --check`: plan somebody's config, and say what it is."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from launcher.util.errors import ExitCode, Failure, UserError, refusing
from launcher.util.flags import OptionParser, split_options
from launcher.util.startup import loading

MOST_FILES: Final = 8


@refusing
def main(argv: Sequence[str]) -> int:
    """Plan the run of a file, or check files; returns an exit code."""
    options, rest = parse(argv)
    with loading():
        from launcher.tools.plan_from.answer import plan_files
        from launcher.tools.plan_from.checking import check, check_flags

    try:
        if options.check and not options.files:
            return check_flags(rest, as_json=options.json)
        if options.check:
            return check(options.files, rest, as_json=options.json)
        return plan_files(options.files, rest, patch=options.patch, as_json=options.json)
    except Failure as error:
        print(f"shardscale: {error}", file=sys.stderr)
        return ExitCode.FAILED


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the arguments into the options of this verb and those of a plan.

    Raises:
        UserError: an option's value is invalid.
    """
    options, rest = split_options(_parser(), argv)
    if not options.files and not options.check:
        raise UserError("--from needs a file: give --from FILE")
    if len(options.files) > MOST_FILES and not options.check:
        raise UserError(f"--from takes at most {MOST_FILES} files of one run")
    if options.patch and options.check:
        raise UserError("--patch and --check: give one of them")
    return options, rest


def _parser() -> OptionParser:
    parser = OptionParser(
        prog="shardscale plan",
        usage="shardscale plan --from FILE [FILE...] [--gpu NAME] [--gpus N] [options]",
        description="Plan the run that a config of another trainer describes: accelerate, "
        "transformers, trl, Axolotl, LLaMA-Factory, torchtitan, torchtune, DeepSpeed, LitGPT.",
        epilog="All options of a plan and flags of launcher.train apply as well and win over the "
        "file: --gpu A100-80GB --seq-len 4096. See `shardscale plan --help`.",
    )
    add = parser.add_argument
    add("--from", dest="files", type=Path, nargs="*", default=[], metavar="FILE", help="config, "
        "and files beside it, such as accelerate's; with --check also folders")  # fmt: skip
    add("--patch", action="store_true", help="print the cheapest change as a unified diff")
    add("--check", action="store_true", help="a line per config; exit 0: all fit, 1: one does not, "
        "2: a wrong value, 3: too close to call")  # fmt: skip
    add("--json", action="store_true", help="print JSON")
    return parser
