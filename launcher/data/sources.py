"""Sources of text: the standard library, files and folders, or a Hugging Face dataset.

A source also names its content by a key, so that a corpus in the cache is found without reading
the text again.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from launcher.config.schema import DataChoice
from launcher.data.files import (
    COMPRESSED,
    HUB_PREFIX,
    TEXT_FIELD,
    field_key,
    hash_once,
    kind_of,
    named_split,
    reading,
    shared_splits,
    walk,
)
from launcher.util.errors import UserError

if TYPE_CHECKING:
    from launcher.data.formats import Document, Form, ReadExample
    from launcher.data.hub import HubDataset

_PLAIN = (".txt", ".md")
_WITH_FIELDS = (".jsonl", ".json", ".parquet")
_IN_FOLDERS = (*_PLAIN, ".jsonl", ".parquet")
"""Other .json files of a folder are seldom text, but for compressed ones."""
_READ_COMPRESSED = (*_PLAIN, ".jsonl", ".json")
_SUFFIXES = (*_PLAIN, *_WITH_FIELDS)
_READ = ", ".join(_SUFFIXES)
_NOT_STDLIB_TEXT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """Local files in the order of their relative paths: .txt, .jsonl and .parquet, or the .py files
    of the standard library."""

    label: str
    files: tuple[Path, ...]
    field: str = TEXT_FIELD
    splits: tuple[str, ...] = ()
    """The split that the name of each file says; () where the text is to be split."""

    def local_files(self) -> tuple[Path, ...]:
        """List the files."""
        return self.files

    def content_key(self, memo_dir: Path) -> str:
        """Hash the files, and add the splits and the field that are read."""
        # parquet without a named field: rows may be examples or texts
        rows = ["rows"] if self.quick_form() is None else []
        return " ".join([hash_once(self.files, memo_dir), *self.splits, *rows]) + field_key(
            self.field
        )

    def parts(self) -> dict[tuple[str, ...], Files]:
        """Return the files of each split, or of two that are the same; {} where the text is to be
        split."""
        named = list(zip(self.splits, self.files, strict=True)) if self.splits else []
        return {
            splits: replace(self, files=tuple(file for of, file in named if of == name), splits=())
            for name, splits in shared_splits(self.splits).items()
        }

    def has_fields(self) -> bool:
        """Return whether the files are records of which one field is read."""
        return any(kind_of(path) in _WITH_FIELDS for path in self.files)

    def quick_form(self) -> Form | None:
        """Return the form, or None where a library would have to be loaded for it."""
        rows = self.field == TEXT_FIELD and any(map(_is_parquet, self.files))
        return None if rows else self.form()

    def form(self) -> Form:
        """Return the form of the records, by the first one; "text" where the field is named.

        Raises:
            UserError: examples beside files of another kind.
        """
        lines = [path for path in self.files if kind_of(path) in _WITH_FIELDS]
        if not lines or self.field != TEXT_FIELD:
            return "text"
        from launcher.data.formats import form_of

        # the first files may be empty: of shards, some are
        records = chain.from_iterable(map(_records, lines))
        form: Form = next((form_of(record) for _, record in records), "text")
        others = [path for path in self.files if path not in lines]
        if form != "text" and others:
            raise UserError(
                f"--data {self.label}: {lines[0].name} does not hold plain texts, and "
                f"{others[0].name} does: give one of them"
            )
        return form

    def examples(self, form: Form, read: ReadExample) -> Iterator[Document]:
        """Yield a document per JSON line or parquet row, of a form other than plain text."""
        from launcher.data.formats import read_examples

        for path in self.files:
            yield from read_examples(_records(path), form, read)

    def texts(self) -> Iterator[str]:
        """Yield one text per JSON line or parquet row, and one or more per plain file."""
        from launcher.data import formats

        for path in self.files:
            with reading(path):
                if _is_parquet(path):
                    from launcher.data.parquet import read_column

                    yield from read_column(path, self.field)
                elif kind_of(path) in _WITH_FIELDS:
                    yield from formats.read_jsonl(path, self.field)
                else:
                    yield from formats.read_text(path)


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    with reading(path):
        if _is_parquet(path):
            from launcher.data.parquet import read_rows

            yield from read_rows(path)
        else:
            from launcher.data.formats import read_records

            yield from read_records(path)


Source: TypeAlias = "Files | HubDataset"
"""A text that can be read repeatedly, in a stable order. `label` is how the user named it.
`content_key(memo_dir)` is the same for the same text; `memo_dir` caches slow hashes."""


def find_source(choice: DataChoice) -> Source:
    """Return the source of a run's data settings; reads no text yet.

    Raises:
        UserError: no such file or folder, an unknown suffix, a folder without a text file, or a
            flag that does not apply to the data.
    """
    data, field = choice.data, choice.data_field
    if data.startswith(HUB_PREFIX):
        from launcher.data.hub import HubDataset

        return HubDataset.named(data, field)
    files = _stdlib_files() if data == "stdlib" else _text_files(data)
    found = Files(label=data, files=files, field=field)
    if (folder := Path(data).expanduser()).is_dir() and data != "stdlib":
        found = _by_name(found, folder)
    if field != TEXT_FIELD and not found.has_fields():
        raise UserError(
            f"--data-field {field}: --data {data} holds no .jsonl or .parquet file, whose fields "
            "have names: leave it out"
        )
    return found


def _stdlib_files() -> tuple[Path, ...]:
    root = Path(sysconfig.get_path("stdlib"))
    # _sysconfigdata holds paths of the machine that built Python: without it, the same Python
    # gives the same corpus everywhere.
    return tuple(
        path
        for path in walk(root, skip=_NOT_STDLIB_TEXT)
        if path.suffix == ".py"
        and not path.name.startswith("_sysconfigdata")
        and os.access(path, os.R_OK)
    )


def _text_files(data: str) -> tuple[Path, ...]:
    path = Path(data).expanduser()
    if path.is_dir():
        there = walk(path, whole=True)
        files = _each_once([file for file in there if _is_text_of_folder(file)])
        if any(kind_of(file) in _WITH_FIELDS for file in files):
            files = _without_readme(files)  # which describes a dataset, as on the Hub
        skipped = (file for file in there if file.suffix.lower() == ".json")
        if (examples := next(filter(_lists, skipped), None)) is not None:
            raise UserError(
                f"--data {data}: {examples.name} in that folder holds a list, and a folder's .json "
                "files are not read: give the file itself, or write it as .jsonl"
            )
        if not files:
            known = ", ".join(_IN_FOLDERS)
            raise UserError(f"--data {data} holds no text: no {known} file in that folder")
        return files
    if not path.exists():
        raise UserError(
            f"--data {data} does not exist: give stdlib, a {_READ} file, a folder of them, "
            "or hf:NAME"
        )
    if kind_of(path) not in (_READ_COMPRESSED if _is_compressed(path) else _SUFFIXES):
        raise UserError(
            f"--data {data}: the suffix {path.suffix!r} is not one that is read "
            f"({_READ}; .gz behind all but the last)"
        )
    return (path,)


def _each_once(files: list[Path]) -> tuple[Path, ...]:
    """Leave out links to others of these files, as `latest.jsonl` is: their text would be read
    twice, and be in two splits."""
    themselves = {os.path.realpath(file) for file in files if not file.is_symlink()}
    return tuple(f for f in files if not f.is_symlink() or os.path.realpath(f) not in themselves)


def _by_name(found: Files, folder: Path) -> Files:
    """Return the files with the splits that their names or folders say, if all of them do. A
    README.md beside them is then no text."""
    files = _without_readme(found.files)
    named = (named_split(file.relative_to(folder).with_suffix("").as_posix()) for file in files)
    splits = tuple(filter(None, named))
    if len(splits) < len(files) or not shared_splits(splits):
        return found
    return replace(found, files=files, splits=splits)


def _without_readme(files: tuple[Path, ...]) -> tuple[Path, ...]:
    return tuple(file for file in files if file.name.lower() != "readme.md")


def _is_compressed(path: Path) -> bool:
    return path.suffix.lower() == COMPRESSED


def _is_text_of_folder(path: Path) -> bool:
    if _is_compressed(path):
        return kind_of(path) in _READ_COMPRESSED
    return kind_of(path) in _IN_FOLDERS


def _lists(path: Path) -> bool:
    from launcher.data.formats import holds_list

    try:
        return holds_list(path)
    except OSError:
        return False
