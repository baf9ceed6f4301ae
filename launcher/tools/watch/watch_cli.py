"""`shardscale watch -- python train.py ...`: start a program with the observer inside."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from launcher.util.errors import UserError, refusing, tell
from launcher.util.flags import OptionParser

USAGE = "shardscale watch [--out FOLDER] [--json] -- COMMAND ..."


@refusing
def main(argv: Sequence[str]) -> int:
    """Run a program, unchanged, and record it; the exit code is the program's, 2 for bad input."""
    options, command = parse(argv)
    return watch(command, options.out, as_json=options.json)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options and the program's command.

    Raises:
        UserError: an invalid option, or no command.
    """
    parser = OptionParser(
        prog="shardscale watch",
        usage=USAGE,
        description="Record phases, memory and steps of any PyTorch program, on GPUs or CPUs, in a "
        "run folder. The program, its output and its exit code stay as they are; tables go to "
        "standard error.",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="run folder (default: runs/...)")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the summary as JSON; the program's own output goes to standard error",
    )
    return parse_before(parser, argv)


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a verb's own words from the program's command, which follows `--`."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def parse_before(parser: OptionParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse a verb's own words, and return them with the program's command.

    Raises:
        UserError: an invalid option, or no command.
    """
    own, command = split_command(argv)
    options = parser.parse_args(own)
    if not command:
        raise UserError(f"no program to start: write its command after --, as in {parser.usage}")
    return options, command


def watch(command: Sequence[str], out: Path | None, *, as_json: bool) -> int:
    """Start the program, wait for its end, complete its run folder; return its exit code."""
    from launcher.measure.records import Status
    from launcher.tools.watch import folder as folders
    from launcher.tools.watch.program import end_as, run_program
    from launcher.tools.watch.tables import summary_lines

    folder = folders.new_folder(out, command, "watch")
    settings = {"folder": str(folder.resolve()), "mode": "watch"}
    folders.write_status(folder, Status(state="running", phase="start"))
    code = run_program(command, folders.observed_environment(settings), stdout_to_stderr=as_json)
    ranks, status, summary = folders.complete(folder, code)
    if not ranks:
        tell(f"no process of {command[0]} has trained with torch: there is nothing to report")
    elif as_json:
        import dataclasses

        print(json.dumps({"folder": str(folder), **dataclasses.asdict(summary)}, indent=2))
    else:
        for line in summary_lines(folder, ranks, status):
            tell(line)
    return end_as(code)
