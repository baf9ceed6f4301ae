"""`shardscale site`: write a page that plans as `shardscale plan` does, without a server."""

from collections.abc import Sequence
from pathlib import Path

from launcher.util.errors import WHY, ExitCode, UserError, naming, refused, refusing
from launcher.util.files import check_writable, replace_text
from launcher.util.flags import OptionParser
from launcher.util.sizes import gib


@refusing
def main(argv: Sequence[str]) -> int:
    """Write the page; returns an exit code of `ExitCode`."""
    options = _parser().parse_args(argv)
    out = options.out
    _check_folder(out)

    from launcher.tools.site.build import site_html  # torch, behind what can be refused without it
    from launcher.tools.site.runtime import load

    page = site_html(load(options.pyodide))
    with refused(OSError, f"OUT {out} cannot be written to ({WHY}): choose another folder"):
        out.mkdir(parents=True, exist_ok=True)
        replace_text(out / "index.html", page)
    print(f"{out / 'index.html'}: {gib(len(page))}, opens from disk or from any web server")
    return ExitCode.DONE


def _parser() -> OptionParser:
    parser = OptionParser(
        prog="shardscale site",
        description="Write a page that holds the planner: one file, no server, no network, and "
        "the results of shardscale plan.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write index.html into")
    package = "Pyodide's npm package (default: fetched once, then cached)"
    parser.add_argument("--pyodide", type=Path, metavar="FILE.tgz", help=package)
    return parser


def _check_folder(out: Path) -> None:
    """Refuse a folder that cannot be written or is not empty.

    Raises:
        UserError: either of both.
    """
    with naming("OUT"):
        check_writable(out)
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"OUT {out} is not empty, and nothing is overwritten: choose another")
