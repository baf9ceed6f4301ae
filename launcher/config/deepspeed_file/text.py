"""The text of a DeepSpeed file -> JSON as everybody else reads it; or one sentence on what is not.

Stricter than Python's reader: a key given twice, NaN and Infinity are refused, since the next
program would read another value there.
"""

import json
import stat
from pathlib import Path
from typing import Any

from launcher.errors import UserError

JsonObject = dict[str, Any]
MOST_BYTES = 1 << 20
MOST_DIGITS = 300
MOST_LEVELS = 20


def brief(value: object, most: int = 40) -> str:
    """A value as JSON in a few printable characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def printable(text: str) -> str:
    """The same on one line, whatever a name may hold."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def called(path: Path) -> str:
    """`--deepspeed FILE`, short enough for a sentence."""
    text = printable(str(path))
    return f"--deepspeed {text if len(text) <= 60 else '...' + text[-57:]}"


def read_json(path: Path) -> JsonObject:
    """Read a file that holds one JSON object.

    Raises:
        UserError: missing, unreadable, not JSON, or not an object.
    """
    deep = UserError(f"{called(path)}: nested too deep, give a DeepSpeed file")
    try:
        content = json.loads(
            _text(path),
            object_pairs_hook=_object,
            parse_constant=_no_number,
            parse_int=_whole_number,
        )
    except json.JSONDecodeError as error:
        hint = " (comments are not JSON)" if error.doc[error.pos :][:1] in ("/", "#") else ""
        raise UserError(f"{called(path)}: not valid JSON, correct it: {error}{hint}") from None
    except RecursionError:
        raise deep from None
    except ValueError as error:
        raise UserError(f"{called(path)}: {error}") from None
    if _is_deep(content):
        raise deep
    if not isinstance(content, dict):
        raise UserError(f"{called(path)}: holds {brief(content)}, but must be a JSON object")
    return content


def _text(path: Path) -> str:
    try:
        if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
            raise UserError(f"{called(path)}: not a regular file, give a JSON file")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise UserError(f"{called(path)}: there is no such file, check the path") from None
    except OSError as error:
        raise UserError(
            f"{called(path)}: cannot be read ({error.strerror}), give a JSON file"
        ) from None
    if len(content) > MOST_BYTES:
        raise UserError(f"{called(path)}: larger than 1 MiB, give a DeepSpeed file")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{called(path)}: not UTF-8 text ({error.reason} at byte {error.start}), save it as "
            "UTF-8"
        ) from None


def _is_deep(content: Any) -> bool:
    """Whether what walks through it would have to fear for its stack."""
    level = [content]
    for _ in range(MOST_LEVELS):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)


def _object(pairs: list[tuple[str, Any]]) -> JsonObject:
    found: JsonObject = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {brief(key)} is given twice in one object: remove one")
        found[key] = value
    return found


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON number: write a number")


def _whole_number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(
            f"a number of {len(digits):,} digits, starting with {digits[:10]}: shorten it"
        )
    return int(digits)
