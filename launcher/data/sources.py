"""Where the text comes from: the standard library, files and folders, or a Hugging Face dataset."""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from launcher.data.cache import write_atomically
from launcher.data.formats import (
    TEXT_FIELD,
    check_columns,
    documents,
    read_jsonl,
    read_parquet,
    read_text,
)
from launcher.errors import UserError
from launcher.extras import how_to_install

HUB_PREFIX = "hf:"

_MEMO_BYTES = 256 << 20

_READERS: dict[str, Callable[[Path], Iterator[str]]] = {
    ".txt": read_text,
    ".md": read_text,
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
}
_SUFFIXES = ", ".join(_READERS)
_NOT_STDLIB_TEXT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3"}
)


class Source(Protocol):
    """A text that can be read from the start as often as needed."""

    @property
    def label(self) -> str:
        """How the user named it."""

    def content_key(self, memo_dir: Path) -> str:
        """Names the content: the same text gives the same key. `memo_dir` keeps slow answers."""

    def documents(self) -> Iterator[str]:
        """The documents in a stable order, none of them blank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stdlib:
    """Source text of the running interpreter's standard library, without tests."""

    label: str = "stdlib"

    def content_key(self, memo_dir: Path) -> str:
        """Hash of the module files; reading 11 MB takes some 20 ms, so nothing is kept."""
        return hash_files(self._files())

    def documents(self) -> Iterator[str]:
        """One document per module."""
        return documents(self._texts())

    def _texts(self) -> Iterator[str]:
        for path in self._files():
            try:
                yield path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # not the user's file and not worth a failed run

    def _files(self) -> list[Path]:
        root = Path(sysconfig.get_path("stdlib"))
        # _sysconfigdata holds the paths of one machine's build: without it, machines with the same
        # Python have the same corpus.
        return [
            path
            for path in _walk(root, skip=_NOT_STDLIB_TEXT)
            if path.suffix == ".py"
            and not path.name.startswith("_sysconfigdata")
            and os.access(path, os.R_OK)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """Local .txt, .jsonl and .parquet files in the order of their relative paths."""

    label: str
    files: tuple[Path, ...]

    def content_key(self, memo_dir: Path) -> str:
        """Hash of the files; that of a long text is kept until a file's size or time changes."""
        stats = [_stat(path) for path in self.files]
        if sum(info.st_size for info in stats) < _MEMO_BYTES:
            return hash_files(self.files)
        # Every rank of every run would read it all, only to find it unchanged.
        stamps = [
            (str(path.absolute()), info.st_size, info.st_mtime_ns, info.st_ino)
            for path, info in zip(self.files, stats, strict=True)
        ]
        memo = memo_dir / hashlib.sha256(repr(stamps).encode()).hexdigest()
        if memo.exists() and (key := memo.read_text()):
            return key
        key = hash_files(self.files)
        # A file written this very moment could change again under the same time stamp.
        if max(info.st_mtime for info in stats) < time.time() - 60:
            write_atomically(memo, key)
        return key

    def documents(self) -> Iterator[str]:
        """A document per .txt file, JSON line or parquet row; fewer than 100 are cut to pieces."""
        return documents(self._texts())

    def _texts(self) -> Iterator[str]:
        for path in self.files:
            try:
                yield from _READERS[path.suffix.lower()](path)
            except OSError as error:
                raise _unreadable(path, error) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class HubDataset:
    """A dataset of the `datasets` library: its split `train`, or its first split without one."""

    label: str
    name: str
    config: str | None

    def content_key(self, memo_dir: Path) -> str:
        """The name, or the content of a local folder."""
        return f"{hub_key(self.name)} {self.config}"

    def documents(self) -> Iterator[str]:
        """A document per row."""
        return documents(self._texts())

    def _texts(self) -> Iterator[str]:
        table = _load_dataset(self.label, self.name, self.config)
        check_columns(table.column_names, self.label)
        kind = table.features[TEXT_FIELD]
        if getattr(kind, "dtype", None) not in ("string", "large_string"):
            raise UserError(f"{self.label}: column {TEXT_FIELD!r} holds {kind}, not strings")
        for batch in table.with_format("arrow").iter(batch_size=1000):
            yield from (text or "" for text in batch.column(TEXT_FIELD).to_pylist())


@functools.lru_cache(maxsize=1)  # a build reads the documents twice
def _load_dataset(label: str, name: str, config: str | None) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"--data {label} needs the library datasets: {how_to_install('hf')}"
        ) from error
    try:
        splits = datasets.load_dataset(name, config)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise UserError(
            f"--data {label}: there is no dataset {name!r} on the Hugging Face Hub, or it is "
            "private: check the name, or log in with `hf auth login`"
        ) from error
    except (ConnectionError, TimeoutError) as error:
        raise UserError(
            f"--data {label}: the Hugging Face Hub cannot be reached and {name!r} is not in its "
            "local cache: connect to the network, or give a local file or folder"
        ) from error
    except Exception as error:
        # Of many kinds: an unknown configuration, a loading script, files that cannot be parsed.
        reason = " ".join(str(error).split())
        raise UserError(f"--data {label} cannot be loaded: {reason}") from error
    return splits["train"] if "train" in splits else next(iter(splits.values()))


def resolve(data: str) -> Source:
    """Turns the value of `--data` into a source; reads no text yet.

    Raises:
        UserError: no such file or folder, a suffix that is not read, a folder without a text file.
    """
    if data == "stdlib":
        return Stdlib()
    if data.startswith(HUB_PREFIX):
        name, _, config = data.removeprefix(HUB_PREFIX).partition(":")
        if not name:
            raise UserError(f"--data {data} names no dataset: write hf:NAME or hf:NAME:CONFIG")
        return HubDataset(label=data, name=name, config=config or None)
    path = Path(data).expanduser()
    if path.is_dir():
        files = tuple(file for file in _walk(path) if file.suffix.lower() in _READERS)
        if not files:
            raise UserError(f"--data {data} holds no text: no {_SUFFIXES} file in that folder")
        return Files(label=data, files=files)
    if not path.exists():
        raise UserError(
            f"--data {data} does not exist: give stdlib, a {_SUFFIXES} file, a folder of them, "
            "or hf:NAME"
        )
    if path.suffix.lower() not in _READERS:
        raise UserError(
            f"--data {data}: the suffix {path.suffix!r} is not one that is read ({_SUFFIXES})"
        )
    return Files(label=data, files=(path,))


def hub_key(name: str) -> str:
    """Names a dataset or tokenizer: a local folder by its content, one on the Hub by its name.

    A warm start must not ask the network, so a change on the Hub is not seen.
    """
    folder = Path(name).expanduser()
    return hash_files(_walk(folder)) if folder.is_dir() else name


def hash_files(paths: list[Path] | tuple[Path, ...]) -> str:
    """SHA-256 over the content of the files, in order, and their suffixes (not their names)."""
    digest = hashlib.sha256()
    for path in paths:
        if not stat.S_ISREG(_stat(path).st_mode):  # opening a pipe waits for its other end
            raise UserError(f"{path} is a pipe or a device: give a file, or remove it")
        try:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
        except OSError as error:
            raise _unreadable(path, error) from error
        digest.update(path.suffix.lower().encode() + content)
    return digest.hexdigest()


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{path} cannot be read ({error.strerror or error}): correct or remove the file"
    )


def _walk(root: Path, skip: frozenset[str] = frozenset()) -> list[Path]:
    """Files below `root` without hidden ones, sorted by relative path."""
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        # In place: os.walk then does not enter them, and site-packages can hold 100,000 files.
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted(found)
