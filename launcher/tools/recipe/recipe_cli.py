"""`shardscale recipe [NAME]`: list the files of `--config` to begin with, or print one."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from launcher.util.errors import ExitCode, UserError, refusing
from launcher.util.flags import OptionParser

FOLDER: Final = Path(__file__).parent / "files"


@refusing
def main(argv: Sequence[str]) -> int:
    """Print the list, or one recipe; returns an exit code."""
    name = parser().parse_args(list(argv)).name
    print("\n".join(listed()) if name is None else text_of(name), end="\n" if name is None else "")
    return ExitCode.DONE


def parser() -> OptionParser:
    """Return the parser of the verb's arguments."""
    found = OptionParser(
        prog="shardscale recipe",
        description="List the recipes, or print one: a file of --config to change and to train.",
    )
    found.add_argument("name", nargs="?", metavar="NAME", help="recipe to print")
    return found


def recipes() -> dict[str, Path]:
    """Return name -> file, in the order of the list."""
    return {path.stem.partition("-")[2]: path for path in sorted(FOLDER.glob("*.yaml"))}


def text_of(name: str) -> str:
    """Return a recipe's text.

    Raises:
        UserError: there is none of that name.
    """
    known = recipes()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise UserError(f"there is no recipe {name!r:.40}: did you mean {close[0]}?")
    return known[name].read_text(encoding="utf-8")


def listed() -> list[str]:
    """Return a line per recipe, with its first comment, and how to use one."""
    lines = [
        f"  {name:22} {text_of(name).partition(chr(10))[0].removeprefix('# ')}"
        for name in recipes()
    ]
    return [
        *lines,
        "",
        "Write one, change it, and train:",
        "",
        "  shardscale recipe lora > run.yaml",
        "  torchrun --nproc 2 -m launcher.train --config run.yaml",
    ]
