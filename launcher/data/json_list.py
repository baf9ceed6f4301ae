"""Elements of a JSON file that is one list, without the memory for all of them."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from launcher.util.errors import UserError, one_line

LONGEST_CHARACTERS: Final = 1 << 28
BLOCK_CHARACTERS = 1 << 20
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_ENDS: Final = frozenset(" \t\n\r,]")
"""Characters behind an element."""


def read_elements(file: IO[bytes], path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place for error messages, element) in order; `path` names the file.

    Raises:
        UserError: the file is not one list in UTF-8, or holds an element of endless length.
    """
    number = 0
    try:
        for number, element in enumerate(elements(file), start=1):
            yield f"{path} example {number}", element
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one
        reason = one_line(str(error), most=100)
        raise UserError(
            f"{path} is not JSON at example {number + 1} ({reason}): correct it, or write .jsonl"
        ) from error


def elements(file: IO[bytes]) -> Iterator[Any]:
    """Yield the elements of the list that a file holds; raises ValueError where it holds none."""
    text = _Text(file)
    decode, before = json.JSONDecoder().raw_decode, "["
    while text.next() == before:
        text.at += 1
        if text.next() == "]" and before == "[":  # skips spaces, too
            break
        while True:
            try:
                element, end = decode(text.held, text.at)
            except json.JSONDecodeError:
                if not text.read_on():
                    raise
                continue
            # else the rest of a number may be in the next block
            if text.held[end : end + 1] in _ENDS or not text.read_on():
                break
        yield element
        text.at, before = end, ","
    if text.next() != "]":
        raise ValueError(f"{before!r} is missing before {text.next() or 'the end'!r}")
    text.at += 1
    if text.next():
        raise ValueError(f"{text.next()!r} behind the end of the list")


class _Text:
    """A text, of which only what has not been decoded is held."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = io.TextIOWrapper(file, encoding="utf-8-sig")
        self.held, self.at = "", 0

    def next(self) -> str:
        """Return the next character that is no space, to which `at` moves; "" at the end."""
        while True:
            space = _SPACE.match(self.held, self.at)
            assert space is not None
            self.at = space.end()
            if self.at < len(self.held) or not self.read_on():
                return self.held[self.at : self.at + 1]

    def read_on(self) -> bool:
        """Read as much again as is held, so that a long element is not tried for each block; False
        at the end. Raises ValueError for more than any element has."""
        left = self.held[self.at :]
        if len(left) > LONGEST_CHARACTERS:
            raise ValueError(f"more than {LONGEST_CHARACTERS:,} characters")
        block = self._file.read(max(BLOCK_CHARACTERS, len(left)))
        if block:
            self.held, self.at = left + block, 0
        return bool(block)
