"""`shardscale matrix`: show which techniques work with which strategies."""

from collections.abc import Sequence
from pathlib import Path

from launcher.util.errors import ExitCode, refusing
from launcher.util.flags import OptionParser
from launcher.util.startup import loading


@refusing
def main(argv: Sequence[str]) -> int:
    """Print the table, or write it between the markers of a file."""
    parser = OptionParser(
        prog="shardscale matrix",
        description="Show which techniques work with which strategies, and why others are refused.",
    )
    parser.add_argument(
        "file",
        type=Path,
        nargs="?",
        help="Markdown file to write the table into, between its markers",
    )
    parser.add_argument("--markdown", action="store_true", help="print Markdown on a terminal too")
    options = parser.parse_args(argv)
    with loading():
        from launcher.compare.sweep.matrix import print_matrix

    print_matrix(options.file, as_markdown=options.markdown)
    return ExitCode.DONE
