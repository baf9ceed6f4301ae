"""How fields are spelled as flags and checked, and how the options of a verb are read."""

import argparse
import math
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from launcher.errors import UserError


def flag(name: str) -> str:
    """`micro_batch` -> `--micro-batch`."""
    return "--" + name.replace("_", "-")


def fields_of(tokens: Iterable[str]) -> set[str]:
    """The fields that flags set: `--lr=1 --no-tied` -> lr, tied (and no_tied, which is none)."""
    names = {t.partition("=")[0][2:].replace("-", "_") for t in tokens if t.startswith("--")}
    return names | {name.removeprefix("no_") for name in names}


def require_positive(section: Any, *names: str) -> None:
    """Refuse fields that are 0, negative or infinite; `None` means not given.

    Raises:
        UserError: naming the first of them.
    """
    for name in names:
        value = getattr(section, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{flag(name)} {value} must be more than 0")


class OptionParser(argparse.ArgumentParser):
    """argparse, with one sentence instead of a usage text."""

    def error(self, message: str) -> NoReturn:
        """Refuse.

        Raises:
            UserError: always.
        """
        raise UserError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


def split_options(
    parser: OptionParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """A verb's own options, and what it leaves to `launcher.train`; `--a_b` is `--a-b`.

    Raises:
        UserError: an own option's value is none.
    """
    dashed = [
        token if not token.startswith("--") else name.replace("_", "-") + equals + value
        for token in argv
        for name, equals, value in [token.partition("=")]
    ]
    return parser.parse_known_args(dashed)
