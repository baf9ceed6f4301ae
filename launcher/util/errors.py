"""Exit codes, and the exception for what the user can fix."""

import contextlib
import enum
import errno
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Final, ParamSpec

P = ParamSpec("P")


class ExitCode(enum.IntEnum):
    """Process exit codes. torchrun turns every failure into 1; our own torchrun does not."""

    DONE = 0
    NOTHING_FITS = 1
    REFUSED = 2
    OUT_OF_MEMORY = 3
    FAILED = 4
    PREEMPTED = 5
    INTERRUPTED = 130
    """By Ctrl-C, as shells count it; a run that was training is saved."""


def tell(sentence: object) -> None:
    """Print a sentence of ours on stderr."""
    print(f"shardscale: {sentence}", file=sys.stderr, flush=True)


class UserError(Exception):
    """Bad input. The message is one sentence that names the value and the fix.

    Whatever was put into it, it comes out as one line of bounded length: values that people give
    can be megabytes long and hold characters that a terminal obeys.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


@contextlib.contextmanager
def naming(place: str) -> Iterator[None]:
    """Prefix a UserError with the place of the value, for example `--config`."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place} {error}") from None


WHY: Final = "\0"
"""Stands for an error's own words in a sentence of `refused`."""


@contextlib.contextmanager
def refused(
    kinds: type[Exception] | tuple[type[Exception], ...], sentence: str = WHY
) -> Iterator[None]:
    """Turn errors of these kinds into a UserError with this sentence; the words of the system's
    errors are those without number and path."""
    try:
        yield
    except kinds as error:
        words = isinstance(error, OSError) and error.strerror
        raise UserError(sentence.replace(WHY, words or str(error))) from None


def refusing(main: Callable[P, int]) -> Callable[P, int]:
    """Make a verb print a UserError as one sentence on stderr and return exit code 2."""

    @functools.wraps(main)
    def verb(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except UserError as error:
            tell(error)
            return ExitCode.REFUSED
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            name = one_line(str(error.filename or "a name"), most=120)
            tell(f"{name} is too long: give a shorter one")
            return ExitCode.REFUSED

    return verb


MOST_CHARACTERS = 280
"""Characters of a sentence: with what is put before it, it stays below 300."""
LONGEST_WORD = 40
"""Lengths that words are shortened to, the longest first, in a sentence that would be longer."""


def one_line(text: str, most: int = MOST_CHARACTERS) -> str:
    """Escape control characters, and shorten `text` in the middle to `most` characters."""
    # first of all, so that a value of megabytes is not walked over and over
    if len(text) > 20 * most:
        text = text[: 10 * most] + text[-10 * most :]
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    words = text.split(" ")
    while (over := len(text) - most) > 0:
        longest = max(range(len(words)), key=lambda number: len(words[number]))
        size = len(words[longest])
        if size <= LONGEST_WORD:
            return _without_middle(text, most)
        words[longest] = _without_middle(words[longest], max(LONGEST_WORD, size - over))
        text = " ".join(words)
    return text


def _without_middle(text: str, most: int) -> str:
    head = (most - 3) * 2 // 3
    return f"{text[:head]}...{text[head + 3 - most :]}"


class Failure(Exception):
    """The run cannot continue. The message is one sentence with the reason and the fix."""


class NotInstalled(UserError):
    """A valid choice whose package is not installed."""
