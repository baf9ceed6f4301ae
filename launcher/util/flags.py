"""Spelling and checks of fields as flags, and options of a verb."""

import argparse
import contextlib
import io
import itertools
import os
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from launcher.util.errors import WHY, UserError, refused

T = TypeVar("T")


def flag(name: str) -> str:
    """`micro_batch` -> `--micro-batch`."""
    return "--" + name.replace("_", "-")


def as_flags(values: Mapping[str, Any]) -> str:
    """`{"micro_batch": 4, "tied": False}` -> `--micro-batch 4 --no-tied`."""
    return " ".join(as_words(values))


def as_words(values: Mapping[str, Any]) -> list[str]:
    """`{"micro_batch": 4, "tied": False}` -> `["--micro-batch", "4", "--no-tied"]`."""
    words = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(flag(name if value else f"no_{name}"))
        else:
            several = value if isinstance(value, tuple | list) else (value,)
            words += [flag(name), *map(str, several)]
    return words


MOST_STEPS = 10**9
MOST_ITEMS = 2**31 - 1  # what 32 bits count
MOST_NUMBER = 1e30  # fp32 ends at 3.4e38
YEAR_S = 365 * 24 * 3600
MOST_RANKS = 2**16  # on a node; and as many nodes
MOST_FILE_BYTES = 2**18
LONGEST_NAME, LONGEST_PATH = 255, 3840  # bytes; of Linux' 4096, room for what a folder will hold


def fields_of(tokens: Iterable[str]) -> set[str]:
    """Return the fields that flags set: `--lr=1 --no-tied` -> lr, tied (and no_tied, which is
    none)."""
    names = {t.partition("=")[0][2:].replace("-", "_") for t in tokens if t.startswith("--")}
    return names | {name.removeprefix("no_") for name in names}


def without(tokens: Iterable[str], *names: str) -> list[str]:
    """Return the tokens less these flags and their values: `--gpus 4`, `--gpus=4`."""
    kept: list[str] = []
    left = iter(tokens)
    for token in left:
        if token in names:
            next(left, None)
        elif token.partition("=")[0] not in names:
            kept.append(token)
    return kept


def require_positive(section: Any, *names: str, most: float = MOST_NUMBER) -> None:
    """Refuse fields that are not above 0 and at most `most`; `None` means not given.

    Raises:
        UserError: naming the first of them.
    """
    for name in names:
        value = getattr(section, name)
        if value is not None and not value > 0:
            raise UserError(f"{flag(name)} {value} must be more than 0")
        require_at_most(section, name, most=most)


def require_at_most(section: Any, *names: str, most: float = MOST_NUMBER) -> None:
    """Refuse fields above any useful value.

    Raises:
        UserError: naming the first of them.
    """
    for name in names:
        value = getattr(section, name)
        if value is not None and value > most:
            shown = f"{most:,}" if isinstance(most, int) else f"{most:g}"
            raise UserError(f"{flag(name)} {value} must be at most {shown}")


def require_range(name: str, value: float | None, least: float, most: float) -> None:
    """Refuse an option outside `least` to `most`.

    Raises:
        UserError: outside.
    """
    if value is not None and not value >= least:
        raise UserError(f"{name} {value} must be {least} or more")
    if value is not None and value > most:
        raise UserError(f"{name} {value} must be at most {most:,}")


def is_number(text: str, kind: type[int] | type[float]) -> bool:
    """Return whether `text` is a number in the digits 0 to 9."""
    try:
        kind(text)  # refuses more digits than Python reads in good time
    except ValueError:
        return False
    return text.isascii()


def usable_path(text: str) -> Path:
    """Return `text` as a path, with `~` expanded; it need not exist.

    Raises:
        UserError: no path, or one that cannot be looked at: too long, a loop of links, closed.
    """
    if any(unicodedata.category(character) == "Cc" for character in text):
        raise UserError(f"{text!r} holds a control character: choose another name")
    gone = f"{text}: the working folder no longer exists, change to another or give a full path"
    with (
        refused(RuntimeError, f"{text}: there is no such user, write the path out"),
        refused(FileNotFoundError, gone),
    ):
        path = Path(text).expanduser()
        whole = os.fsencode(path.absolute())
    longest = max(map(len, whole.split(b"/")))
    if len(whole) > LONGEST_PATH or longest > LONGEST_NAME:
        raise UserError(
            f"{text} is too long, {len(whole)} bytes with a name of {longest}: use at most "
            f"{LONGEST_PATH} in all and {LONGEST_NAME} in a name"
        )
    try:
        os.stat(f"{path}/.")  # of a folder also whether what is in it can be looked at
    except (FileNotFoundError, NotADirectoryError):
        pass  # who needs it says so, and it may be a file
    except OSError as error:
        raise UserError(f"{text}: {error.strerror}, give another path") from None
    return path


def read_small_file(path: Path, *, what: str, most_bytes: int = MOST_FILE_BYTES) -> str:
    """Return the text of a hand-written file.

    Raises:
        UserError: nothing that can be read at once and whole.
    """
    require_regular_file(path, what=what)
    with (
        refused(UnicodeDecodeError, f"{path}: not UTF-8 text ({WHY}), save it as UTF-8"),
        refused(OSError, f"{path}: cannot be read ({WHY}), give {what}"),
    ):
        if path.stat().st_size > most_bytes:
            raise UserError(f"{path}: is larger than {most_bytes:,} bytes, give {what}")
        return path.read_text(encoding="utf-8")


def require_regular_file(path: Path, *, what: str) -> None:
    """Refuse files without an end, or that can be read only once.

    Raises:
        UserError: missing, a folder, a pipe or a device.
    """
    with refused(OSError, f"{path}: cannot be read ({WHY}), give {what}"):
        if not path.exists():
            raise UserError(f"{path}: there is no such file, check the path")
        if path.is_dir():
            raise UserError(f"{path}: Is a directory, give {what}")
        if not path.is_file():
            raise UserError(f"{path}: is a pipe or a device, give {what}")


def _typed(kind: type[int] | type[float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        if not is_number(text, kind):
            raise ValueError(text)
        return kind(text)

    return read


class OptionParser(argparse.ArgumentParser):
    """argparse with one sentence instead of usage, values parsed as flags are, and no
    abbreviations."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, allow_abbrev=False)
        for kind in (int, float):
            self.register("type", kind, _typed(kind))
        self.register("type", Path, lambda text: Path(text) if text == "-" else usable_path(text))

    def error(self, message: str) -> NoReturn:
        """Raise the message as a UserError.

        Raises:
            UserError: always.
        """
        raise UserError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


def split_options(
    parser: OptionParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Split a verb's own options from those for `launcher.train`; `--a_b` is `--a-b`.

    Raises:
        UserError: an own option's value is invalid.
    """
    return parser.parse_known_args(_dashed(argv))


def _dashed(argv: Sequence[str]) -> list[str]:
    return [
        token if not token.startswith("--") else name.replace("_", "-") + equals + value
        for token in argv
        for name, equals, value in [token.partition("=")]
    ]


def _is_rule(line: str) -> bool:
    return not line.strip("-")


_CLOSE = "Perhaps you meant:"


def options_of(kind: type[T], argv: Sequence[str], prog: str) -> T:
    """Return a verb's options by a dataclass of them, as tyro reads them; --help is printed.

    Raises:
        UserError: what tyro prints as a boxed error.
    """
    import tyro

    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return tyro.cli(kind, args=_dashed(argv), prog=prog)
    except SystemExit as exit_:
        if exit_.code in (0, None):
            raise
        lines = [line.strip("│╭╮╰╯─ ") for line in captured.getvalue().splitlines()]
        # below the box's title, up to its first empty line; without UTF-8 the box is of hyphens
        body = list(itertools.dropwhile(_is_rule, lines[1:]))
        end = next((i for i, line in enumerate(body) if _is_rule(line)), len(body))
        said = " ".join(body[:end]).replace("Error parsing ", "")
        if _CLOSE in body[:-1]:
            said += f": did you mean {body[body.index(_CLOSE) + 1].split()[0]}?"
        elif said.startswith("Unrecognized"):
            said += f"; {prog} --help lists them"
        raise UserError(said) from None
