"""Reading text out of one file, and cutting a long text into documents."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from launcher.errors import UserError
from launcher.extras import how_to_install

TEXT_FIELD = "text"

_READ_CHARACTERS = 1 << 20
_LONGEST_LINE_BYTES = 1 << 28
_MOST_LISTED = 5
_FEWEST_WHOLE_DOCUMENTS = 100
_SHORTEST_PIECE, _LONGEST_PIECE = 512, 16_384


def read_text(path: Path) -> Iterator[str]:
    """Yields a UTF-8 file whole, or in pieces of at most about a million characters.

    Raises:
        UserError: the file is not UTF-8.
    """
    rest = ""
    try:
        with path.open(encoding="utf-8-sig") as file:
            while block := file.read(_READ_CHARACTERS):
                *pieces, rest = cut(rest + block, _READ_CHARACTERS)
                yield from pieces
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 (byte {error.object[error.start]:#04x}): "
            "convert it, for example with iconv -t utf-8"
        ) from error
    yield rest


def read_jsonl(path: Path, field: str) -> Iterator[str]:
    """Yields `field` of each line.

    Raises:
        UserError: a line is not UTF-8, not JSON, or has no such string field.
    """
    with path.open("rb") as file:
        lines = iter(partial(file.readline, _LONGEST_LINE_BYTES), b"")
        for number, raw in enumerate(lines, start=1):
            if len(raw) == _LONGEST_LINE_BYTES:
                raise UserError(
                    f"{path} line {number} is longer than {_LONGEST_LINE_BYTES:,} bytes: write one "
                    "JSON object per line"
                )
            line = raw.removeprefix(b"\xef\xbb\xbf").strip()
            if not line:
                continue
            try:
                record = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise UserError(f"{path} line {number} is not UTF-8: convert the file") from error
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{path} line {number} is not JSON ({error.msg} at column {error.colno}): "
                    "a .jsonl file holds one JSON object per line"
                ) from error
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{path} line {number} has a number of too many digits, or is nested too deep: "
                    "correct or remove the line"
                ) from error
            yield _without_lone_surrogates(_text_of(record, field, f"{path} line {number}"))


def read_parquet(path: Path, field: str) -> Iterator[str]:
    """Yields the column `field`, row by row, without nulls.

    Raises:
        UserError: pyarrow is missing, the file is damaged, or there is no such string column.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(
            f"{path} is a parquet file and pyarrow is not installed: {how_to_install('hf')}"
        ) from error
    try:
        file = pq.ParquetFile(path)
        schema = file.schema_arrow
        check_columns(schema.names, field, str(path))
        kind = schema.field(field).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise UserError(f"{path}: column {field!r} holds {kind}, it must hold strings")
        for batch in file.iter_batches(columns=[field]):
            yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except (pa.ArrowException, OSError, UnicodeDecodeError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{path} cannot be read as parquet ({reason}): write or copy it again"
        ) from error


def check_columns(names: list[str], field: str, where: str) -> None:
    """Refuses a table without the column `field`, and says which columns it has."""
    if field not in names:
        raise UserError(
            f"{where} has no column {field!r} (columns: {_listed(names)}): "
            "name the one that holds the text with --data-field"
        )


def _listed(names: Iterable[object]) -> str:
    """The first of them: a table can have thousands of columns."""
    first = [f"{name!s:.24}" for name in islice(names, _MOST_LISTED + 1)]
    if len(first) > _MOST_LISTED:
        first[-1] = "..."
    return ", ".join(first) or "none"


def documents(texts: Iterator[str]) -> Iterator[str]:
    """Drops blank texts, and cuts a handful of long ones into pieces.

    One large text file is what most people have, and one document cannot fill three splits. So
    fewer than 100 texts are cut into about 100 documents (of 512 to 16,384 characters) at
    paragraph or line ends; 100 texts or more stay whole.
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
    """Cuts `text` into pieces of at most `size` characters, after a blank line where there is one,
    else after a line, else after a space. The pieces joined are the text."""
    start = 0
    while len(text) - start > size:
        for boundary in ("\n\n", "\n", " "):
            # Not in the first half: a boundary there would give crumbs.
            found = text.rfind(boundary, start + size // 2, start + size)
            if found >= 0:
                end = found + len(boundary)
                break
        else:
            end = start + size
        yield text[start:end]
        start = end
    yield text[start:]


def _text_of(record: Any, field: str, where: str) -> str:
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise UserError(f'{where} is a JSON {kind}, not an object: write {{"{field}": "..."}}')
    if field not in record:
        raise UserError(
            f"{where} has no field {field!r} (fields: {_listed(record)}): "
            "name the one that holds the text with --data-field"
        )
    text = record[field]
    if not isinstance(text, str):
        raise UserError(f"{where}: {field!r} is {text!r:.40}, it must be a string")
    return text


def _without_lone_surrogates(text: str) -> str:
    # JSON can spell half of a surrogate pair ("\ud83d"), which no tokenizer can encode.
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
