"""Readers of text files and .jsonl lines, and the documents that records become."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Final, Literal, NamedTuple, TypeGuard, cast

from launcher.data.files import COMPRESSED, TEXT_FIELD, kind_of
from launcher.util.errors import WHY, UserError, refused

Form = Literal["text", "completions", "turns", "messages", "alpaca", "sharegpt"]


class Document(NamedTuple):
    """A text, and the spans of it to learn where that is not all of it."""

    text: str
    learned: tuple[tuple[int, int], ...] | None = None
    """(first character, end) of each span; None for all of a plain text."""
    ends_itself: bool = False
    """The text contains its own end: no end-of-text token is added."""


ReadExample = Callable[[dict[str, Any], str], Document]
"""(record, its place for error messages) -> document."""


FIELDS: Final[dict[Form, str]] = {
    "text": "a text",
    "completions": "prompt and completion",
    "turns": "messages of a prompt and a completion",
    "messages": "messages",
    "alpaca": "instruction and output",
    "sharegpt": "conversations",
}
"""Form -> the fields by which it is recognised."""
_READ_CHARACTERS = 1 << 20
_LONGEST_LINE_BYTES = 1 << 28
_MOST_LISTED = 5
_NAME_FIELD = (
    "name the one that holds the text with --data-field, or rename two to prompt and completion"
)
_FEWEST_WHOLE_DOCUMENTS = 100
_SHORTEST_PIECE, _LONGEST_PIECE = 512, 16_384


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, through gzip if it is compressed.

    Raises:
        UserError: a compressed file is damaged.
    """
    if path.suffix.lower() != COMPRESSED:
        with path.open("rb") as file:
            yield file
        return
    said = f"{path} cannot be decompressed ({WHY}): write or copy it again"
    with refused((gzip.BadGzipFile, EOFError, zlib.error), said), gzip.open(path) as file:
        yield cast("IO[bytes]", file)


def holds_list(path: Path) -> bool:
    """Return whether a .json file holds one list, by its first character; else it holds lines."""
    with open_bytes(path) as file:
        return file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def read_text(path: Path) -> Iterator[str]:
    """Yield a UTF-8 file whole, or in pieces of about a million characters.

    Raises:
        UserError: the file is not UTF-8.
    """
    rest = ""
    try:
        # A foreign file among the standard library's modules is not worth a failed run.
        errors = "replace" if path.suffix == ".py" else "strict"
        with (
            open_bytes(path) as raw,
            io.TextIOWrapper(raw, encoding="utf-8-sig", errors=errors) as file,
        ):
            while block := file.read(_READ_CHARACTERS):
                *pieces, rest = cut(rest + block, _READ_CHARACTERS)
                yield from pieces
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 (byte {error.object[error.start]:#04x}): "
            "convert it, for example with iconv -t utf-8"
        ) from error
    yield rest


def read_jsonl(path: Path, field: str, fix: str = _NAME_FIELD) -> Iterator[str]:
    """Yield `field` of each line; `fix` ends the message about a line without it.

    Raises:
        UserError: a line is not UTF-8, not JSON, or has no such string field.
    """
    for where, record in read_records(path):
        if not isinstance(record, dict):
            kind = type(record).__name__
            raise UserError(f'{where} is a JSON {kind}, not an object: write {{"{field}": "..."}}')
        check_fields(record, field, where, "field", fix)
        yield string_of(record, field, where)


def read_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place for error messages, decoded JSON) of each line that is not blank, or of each
    element of a .json file that is one list.

    Raises:
        UserError: a line is not UTF-8 or not JSON.
    """
    if kind_of(path) == ".json" and holds_list(path):
        from launcher.data.json_list import read_elements

        with open_bytes(path) as file:
            yield from read_elements(file, path)
        return
    with open_bytes(path) as file:
        # at most so long: a file without line ends would fill the memory
        lines = iter(partial(file.readline, _LONGEST_LINE_BYTES), b"")
        for number, raw in enumerate(lines, start=1):
            if len(raw) == _LONGEST_LINE_BYTES:
                raise UserError(
                    f"{path} line {number} is longer than {_LONGEST_LINE_BYTES:,} bytes: write one "
                    "JSON object per line"
                )
            line = raw.removeprefix(b"\xef\xbb\xbf").strip()  # byte order mark
            if not line:
                continue
            try:
                record = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise UserError(f"{path} line {number} is not UTF-8: convert the file") from error
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{path} line {number} is not JSON ({error.msg} at column {error.colno}): "
                    "write one JSON object per line, or one list as .json"
                ) from error
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{path} line {number} has a number of too many digits, or is nested too deep: "
                    "correct or remove the line"
                ) from error
            yield f"{path} line {number}", record


def form_of(record: Any) -> Form:
    """Return the form of a line; a line without the fields of any form counts as text."""
    fields = record.keys() if isinstance(record, dict) else {}.keys()
    if fields >= {"instruction", "output"}:  # Alpaca's lines have all of it as a text besides
        return "alpaca"
    if TEXT_FIELD in fields:
        return "text"
    if "messages" in fields:
        return "messages"
    if "conversations" in fields:
        return "sharegpt"
    if isinstance(record, dict) and is_messages(record.get("prompt")):
        return "turns"
    return "completions" if "prompt" in fields or "completion" in fields else "text"


def is_messages(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Return whether a value is a list of objects."""
    return isinstance(value, list) and all(isinstance(element, dict) for element in value)


def read_examples(
    records: Iterator[tuple[str, Any]], form: Form, read: ReadExample
) -> Iterator[Document]:
    """Yield a document per record, each made by `read`.

    Raises:
        UserError: a record has another form, or `read` rejects it.
    """
    for where, record in records:
        if (found := form_of(record)) != form:
            unknown = found == "text" and not (isinstance(record, dict) and TEXT_FIELD in record)
            raise UserError(
                f"{where} holds {'no known fields' if unknown else FIELDS[found]}, and the data "
                f"begins with {FIELDS[form]}: write all lines in one form"
            )
        yield read(record, where)


def with_prompt(record: dict[str, Any], where: str) -> Document:
    """Return a record's prompt, which may be empty, and completion; only the latter is learned.

    Raises:
        UserError: one of them is missing or no string, or the completion is empty.
    """
    prompt, completion = (string_of(record, field, where) for field in ("prompt", "completion"))
    if not completion or completion.isspace():
        raise UserError(
            f"{where}: its completion is empty, so there is nothing to learn: write one, or remove "
            "the line"
        )
    text = prompt + completion
    return Document(text, ((len(prompt), len(text)),))


def check_fields(
    names: Collection[str], field: str, where: str, what: str = "column", fix: str = _NAME_FIELD
) -> None:
    """Reject a table or record without `field`, naming the first fields it has (of thousands).

    Raises:
        UserError: it has no such field.
    """
    if field not in names:
        reject_pair(names, where)
        first = [f"{name!s:.24}" for name in islice(names, _MOST_LISTED + 1)]
        if len(first) > _MOST_LISTED:
            first[-1] = "..."
        raise UserError(
            f"{where} has no {what} {field!r} ({what}s: {', '.join(first) or 'none'}): {fix}"
        )


def reject_pair(names: Collection[str], where: str) -> None:
    """Reject a table or record of preferences: of each pair, one answer is a bad one.

    Raises:
        UserError: it has the fields of a pair.
    """
    if {"chosen", "rejected"} <= {*names}:
        raise UserError(
            f"{where}: 'chosen' and 'rejected' are a pair for preference training, which is not "
            "offered: to fine-tune, rename 'chosen' to 'completion', or a list to 'messages'"
        )


def documents(texts: Iterator[str]) -> Iterator[str]:
    """Drop blank texts, and cut a handful of long ones into pieces.

    Most people have one large text file, and one document cannot fill three splits. So fewer than
    100 texts are cut into about 100 documents (of 512 to 16,384 characters) at paragraph or line
    ends; 100 texts or more stay whole.
    """
    filled = (text for text in texts if text and not text.isspace())
    head = list(islice(filled, _FEWEST_WHOLE_DOCUMENTS))
    if len(head) == _FEWEST_WHOLE_DOCUMENTS:
        yield from chain(head, filled)
        return
    wanted = sum(map(len, head)) // _FEWEST_WHOLE_DOCUMENTS
    size = min(max(wanted, _SHORTEST_PIECE), _LONGEST_PIECE)
    for text in head:
        yield from (piece for piece in cut(text, size) if not piece.isspace())


def cut(text: str, size: int) -> Iterator[str]:
    """Cut `text` into pieces of at most `size` characters, after a blank line where possible, else
    after a line, else after a space. The pieces joined are the text."""
    start = 0
    while len(text) - start > size:
        for boundary in ("\n\n", "\n", " "):
            # A boundary in the first half would leave tiny pieces.
            found = text.rfind(boundary, start + size // 2, start + size)
            if found >= 0:
                end = found + len(boundary)
                break
        else:
            end = start + size
        yield text[start:end]
        start = end
    yield text[start:]


def string_of(record: dict[str, Any], field: str, where: str) -> str:
    """Return a field of a JSON object, without lone surrogates.

    Raises:
        UserError: it is missing, or no string.
    """
    if field not in record:
        raise UserError(f"{where} has no {field!r}: write it, or remove the line")
    text = record[field]
    if not isinstance(text, str):
        raise UserError(f"{where}: {field!r} is {text!r:.40}, it must be a string")
    return without_surrogates(text)


def without_surrogates(text: str) -> str:
    """Return a text without the lone surrogates that JSON can spell, and no tokenizer encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
