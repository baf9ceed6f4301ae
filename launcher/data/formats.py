"""Files: which there are, the hash that names what they hold, their text, and documents of it."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from launcher.util.errors import UserError
from launcher.util.packages import how_to_install

TEXT_FIELD = "text"

_READ_CHARACTERS = 1 << 20
_LONGEST_LINE_BYTES = 1 << 28
_MOST_LISTED = 5
_FEWEST_WHOLE_DOCUMENTS = 100
_SHORTEST_PIECE, _LONGEST_PIECE = 512, 16_384


def walk(root: Path, skip: frozenset[str] = frozenset()) -> list[Path]:
    """Files below `root` without hidden ones, sorted by relative path."""
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        # In place: os.walk then does not enter them, and site-packages can hold 100,000 files.
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted(found)


def hash_files(paths: Sequence[Path]) -> str:
    """SHA-256 over the content of the files, in order, and their suffixes (not their names)."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe waits for its other end
                raise UserError(f"{path} is a pipe or a device: give a file, or remove it")
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
        except OSError as error:
            raise unreadable(path, error) from error
        digest.update(path.suffix.lower().encode() + content)
    return digest.hexdigest()


def stamps(paths: Sequence[Path]) -> list[tuple[str, int, int, int, int]]:
    """Path, size, times of change and inode of each file.

    Equal stamps before and after a reading mean that the same bytes were there throughout: ctime
    cannot be set back, so a file that was replaced and restored has another one.
    """
    try:
        found = [(path, path.stat()) for path in paths]
    except OSError as error:
        raise unreadable(Path(error.filename), error) from error
    return [
        (str(path.absolute()), info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)
        for path, info in found
    ]


def hub_files(name: str) -> list[Path]:
    """Files of a dataset or tokenizer that is a local folder; none of one on the Hub."""
    folder = Path(name).expanduser()
    return walk(folder) if folder.is_dir() else []


def hub_key(name: str) -> str:
    """Names a dataset or tokenizer: a local folder by its content, one on the Hub by its name.

    A warm start must not ask the network, so a change on the Hub is not seen.
    """
    return hash_files(hub_files(name)) if Path(name).expanduser().is_dir() else name


def field_key(field: str) -> str:
    """What a field adds to a content key: the usual one nothing."""
    return "" if field == TEXT_FIELD else f" {field}"


def unreadable(path: Path, error: OSError) -> UserError:
    """For a file that the system does not let us read."""
    return UserError(
        f"{path} cannot be read ({error.strerror or error}): correct or remove the file"
    )


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
    for where, record in read_records(path):
        if not isinstance(record, dict):
            kind = type(record).__name__
            raise UserError(f'{where} is a JSON {kind}, not an object: write {{"{field}": "..."}}')
        check_fields(record, field, where, "field")
        yield string_of(record, field, where)


def read_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields where each line stands, for messages, and what it holds.

    Raises:
        UserError: a line is not UTF-8 or not JSON.
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
            yield f"{path} line {number}", record


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
        check_fields(schema.names, field, str(path))
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


def check_fields(names: Collection[str], field: str, where: str, what: str = "column") -> None:
    """Refuses a table or record without `field`, and says the first of those it has: they can be
    thousands."""
    if field not in names:
        first = [f"{name!s:.24}" for name in islice(names, _MOST_LISTED + 1)]
        if len(first) > _MOST_LISTED:
            first[-1] = "..."
        raise UserError(
            f"{where} has no {what} {field!r} ({what}s: {', '.join(first) or 'none'}): "
            "name the one that holds the text with --data-field"
        )


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


def string_of(record: dict[str, Any], field: str, where: str) -> str:
    """A field of a JSON object.

    Raises:
        UserError: it is not there, or no string.
    """
    if field not in record:
        raise UserError(f"{where} has no {field!r}: write it, or remove the line")
    text = record[field]
    if not isinstance(text, str):
        raise UserError(f"{where}: {field!r} is {text!r:.40}, it must be a string")
    return _without_lone_surrogates(text)


def _without_lone_surrogates(text: str) -> str:
    # JSON can spell half of a surrogate pair ("\ud83d"), which no tokenizer can encode.
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
