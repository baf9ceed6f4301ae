"""Where the text comes from: the standard library, files and folders, or a Hugging Face dataset."""

from __future__ import annotations

import hashlib
import os
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.data.examples import Document, Form, ReadExample, form_of_file, read_examples
from launcher.data.formats import (
    TEXT_FIELD,
    field_key,
    hash_files,
    read_jsonl,
    read_parquet,
    read_text,
    stamps,
    unreadable,
    walk,
)
from launcher.data.hub import HUB_PREFIX, HubDataset
from launcher.util.errors import UserError
from launcher.util.files import replace_text

_MEMO_BYTES = 256 << 20

_PLAIN = (".txt", ".md")
_WITH_FIELDS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
}
_EXAMPLES = ".jsonl"
_SUFFIXES = (*_PLAIN, *_WITH_FIELDS)
_READ = ", ".join(_SUFFIXES)
_NOT_STDLIB_TEXT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stdlib:
    """Source text of the running interpreter's standard library, without tests."""

    label: str = "stdlib"

    def content_key(self, memo_dir: Path) -> str:
        """Hash of the module files; reading 11 MB takes some 20 ms, so nothing is kept."""
        return hash_files(self.local_files())

    def texts(self) -> Iterator[str]:
        """One per module."""
        for path in self.local_files():
            try:
                yield path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # not the user's file and not worth a failed run

    def local_files(self) -> list[Path]:
        """One per module."""
        root = Path(sysconfig.get_path("stdlib"))
        # _sysconfigdata holds the paths of one machine's build: without it, machines with the same
        # Python have the same corpus.
        return [
            path
            for path in walk(root, skip=_NOT_STDLIB_TEXT)
            if path.suffix == ".py"
            and not path.name.startswith("_sysconfigdata")
            and os.access(path, os.R_OK)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """Local .txt, .jsonl and .parquet files in the order of their relative paths."""

    label: str
    files: tuple[Path, ...]
    field: str = TEXT_FIELD

    def local_files(self) -> tuple[Path, ...]:
        """All that is read."""
        return self.files

    def content_key(self, memo_dir: Path) -> str:
        """Names the files' bytes, and what is read of them."""
        return self._hash(memo_dir) + field_key(self.field)

    def _hash(self, memo_dir: Path) -> str:
        """Hash of the files; that of a long text is kept until a file's size or time changes."""
        found = stamps(self.files)
        if sum(size for _, size, *_ in found) < _MEMO_BYTES:
            return hash_files(self.files)
        # Every rank of every run would read it all, only to find it unchanged.
        memo = memo_dir / hashlib.sha256(repr(found).encode()).hexdigest()
        if memo.exists() and (key := memo.read_text()):
            return key
        key = hash_files(self.files)
        # A file written this very moment could change again under the same time stamp.
        if max(mtime_ns for _, _, mtime_ns, *_ in found) < (time.time() - 60) * 1e9:
            memo_dir.mkdir(parents=True, exist_ok=True)
            replace_text(memo, key)
        return key

    def form(self) -> Form:
        """What the lines of .jsonl files hold, by the first one; texts, where the field is named.

        Raises:
            UserError: examples beside files of another kind.
        """
        lines = [path for path in self.files if path.suffix.lower() == _EXAMPLES]
        form = form_of_file(lines[0]) if lines and self.field == TEXT_FIELD else "text"
        others = [path for path in self.files if path not in lines]
        if form != "text" and others:
            raise UserError(
                f"--data {self.label}: {lines[0].name} does not hold plain texts, and "
                f"{others[0].name} does: give one of them"
            )
        return form

    def examples(self, form: Form, read: ReadExample) -> Iterator[Document]:
        """One per JSON line, of a form that is not plain text."""
        for path in self.files:
            try:
                yield from read_examples(path, form, read)
            except OSError as error:
                raise unreadable(path, error) from error

    def texts(self) -> Iterator[str]:
        """One per .txt file, JSON line or parquet row."""
        for path in self.files:
            try:
                reader = _WITH_FIELDS.get(path.suffix.lower())
                yield from read_text(path) if reader is None else reader(path, self.field)
            except OSError as error:
                raise unreadable(path, error) from error


Source = Stdlib | Files | HubDataset
"""A text that can be read from the start as often as needed. `label` is how the user named it, and
`texts` come in a stable order. The same text gives the same `content_key`,
whose `memo_dir` keeps slow answers."""


def form_of_source(source: Source) -> Form:
    """What a source holds; only files can hold something else than texts.

    Raises:
        UserError: as `Files.form`, or a first line that cannot be read.
    """
    return source.form() if isinstance(source, Files) else "text"


def resolve(data: str, field: str = TEXT_FIELD, stream_bytes: int | None = None) -> Source:
    """Turns the values of `--data`, `--data-field` and `--data-stream` into a source; reads no text
    yet.

    Raises:
        UserError: no such file or folder, a suffix that is not read, a folder without a text file,
            a flag that the data has no use for.
    """
    if data.startswith(HUB_PREFIX):
        return HubDataset.named(data, field, stream_bytes)
    if stream_bytes is not None:
        raise UserError(f"--data-stream is for --data hf:NAME, not {data}: leave it out")
    files = () if data == "stdlib" else _text_files(data)
    if field != TEXT_FIELD and not any(path.suffix.lower() in _WITH_FIELDS for path in files):
        raise UserError(
            f"--data-field {field}: --data {data} holds no .jsonl or .parquet file, whose fields "
            "have names: leave it out"
        )
    return Files(label=data, files=files, field=field) if files else Stdlib()


def _text_files(data: str) -> tuple[Path, ...]:
    path = Path(data).expanduser()
    if path.is_dir():
        files = tuple(file for file in walk(path) if file.suffix.lower() in _SUFFIXES)
        if not files:
            raise UserError(f"--data {data} holds no text: no {_READ} file in that folder")
        return files
    if not path.exists():
        raise UserError(
            f"--data {data} does not exist: give stdlib, a {_READ} file, a folder of them, "
            "or hf:NAME"
        )
    if path.suffix.lower() not in _SUFFIXES:
        raise UserError(
            f"--data {data}: the suffix {path.suffix!r} is not one that is read ({_READ})"
        )
    return (path,)
