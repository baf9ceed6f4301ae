"""Datasets and tokenizers of the Hugging Face libraries `datasets` and `transformers`."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from launcher.data.files import (
    HUB_PREFIX,
    TEXT_FIELD,
    TOKENIZER_FILE,
    copy_files,
    dataset_key,
    field_key,
    files_beside,
    hub_files,
    named_split,
    shared_splits,
)
from launcher.data.formats import Document, Form, ReadExample, check_fields, form_of
from launcher.data.parquet import without_nulls
from launcher.util.errors import UserError, refused
from launcher.util.hub_cache import go_offline_if_unreachable, is_cached, is_offline
from launcher.util.packages import how_to_install
from launcher.util.sizes import parse_bytes

_SLICE: Final = re.compile(r"(.*)\[:([^\[\]]*)\]")
_SENTENCEPIECE: Final = "tokenizer.model"
_UNREACHABLE: Final = (
    "{}: the Hugging Face Hub cannot be reached and {!r} is not in its local cache: connect to the "
    "network, or give a local {}folder"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HubDataset:
    """A dataset of the `datasets` library: the given split, else its own splits for training and
    held-out text, else `train`, else the first, which is to be split.

    With `stream_bytes`, only that much text is read from the start, and no more is downloaded.
    """

    label: str
    name: str
    config: str | None
    split: str | None
    field: str
    stream_bytes: int | None

    @classmethod
    def named(cls, data: str, field: str) -> Self:
        """Parse `hf:NAME[:CONFIG][@SPLIT]`, with `[:SIZE]` behind it to stream so much text.

        Raises:
            UserError: no name, or no size in the brackets.
        """
        label, size = data, None
        if (sliced := _SLICE.fullmatch(data)) is not None:
            label, size = sliced.groups()
        whole = label.removeprefix(HUB_PREFIX)
        name, at, split = whole.rpartition("@")
        if not at or "/" in split:  # a folder's own @
            name, split = whole, ""
        name, _, config = name.partition(":")
        if not name:
            raise UserError(
                f"--data {data} names no dataset: write hf:NAME, hf:NAME:CONFIG or hf:NAME@SPLIT"
            )
        return cls(
            label=label,
            name=str(Path(name).expanduser()),
            config=config or None,
            split=split or None,
            field=field,
            stream_bytes=None if size is None else parse_bytes(size, f"--data {label}, its part"),
        )

    def local_files(self) -> list[Path]:
        """List the files of a local folder; [] for a dataset on the Hub."""
        return hub_files(self.name)

    def content_key(self, memo_dir: Path) -> str:
        """Return the name, or a local folder's hash, with the part of it that is read."""
        part = f" @{self.split}" if self.split else "" if self.stream_bytes else " splits"
        part += f" first {self.stream_bytes}" if self.stream_bytes else ""
        return f"{dataset_key(self.name, memo_dir)} {self.config}{part}{field_key(self.field)}"

    def parts(self) -> dict[tuple[str, ...], HubDataset]:
        """Return the dataset of each split, or of two that are the same; {} where one is to be
        split. Loads the dataset."""
        if self.split is not None or self.stream_bytes is not None:
            return {}
        # of two names for one split the first counts
        named = {named_split(name): name for name in reversed(list(_load_all(self)))}
        return {
            splits: replace(self, label=f"{self.label}@{named[of]}", split=named[of])
            for of, splits in shared_splits({of for of in named if of is not None}).items()
        }

    def quick_form(self) -> None:
        """Return None: the form is that of the rows, for which the dataset is loaded."""

    def form(self) -> Form:
        """Return the form of the rows, by their columns; "text" where the field is named. Loads the
        dataset.

        Raises:
            UserError: it cannot be loaded.
        """
        if self.field != TEXT_FIELD:
            return "text"
        names = _load(self).column_names  # unknown of some streams
        return form_of(dict.fromkeys(names) if names else next(self._rows(), None))

    def examples(self, form: Form, read: ReadExample) -> Iterator[Document]:
        """Yield a document per row, of a form other than plain text."""
        left_bytes = self.stream_bytes or float("inf")
        for number, row in enumerate(self._rows(), start=1):
            document = read(row, f"{self.label} row {number}")
            yield document
            left_bytes -= len(document.text.encode())
            if left_bytes <= 0:
                return

    def texts(self) -> Iterator[str]:
        """Yield the text of each row."""
        return self._whole() if self.stream_bytes is None else self._streamed(self.stream_bytes)

    def _whole(self) -> Iterator[str]:
        table = _load(self)
        check_fields(table.column_names, self.field, self.label)
        kind = table.features[self.field]
        if getattr(kind, "dtype", None) not in ("string", "large_string"):
            raise UserError(f"{self.label}: column {self.field!r} holds {kind}, not strings")
        for batch in table.with_format("arrow").iter(batch_size=1000):
            yield from (text or "" for text in batch.column(self.field).to_pylist())

    def _streamed(self, left_bytes: int) -> Iterator[str]:
        for row in self._rows():
            check_fields(row, self.field, self.label)
            text = "" if row[self.field] is None else row[self.field]
            if not isinstance(text, str):
                kind = type(text).__name__
                raise UserError(f"{self.label}: column {self.field!r} holds {kind}, not strings")
            yield text
            left_bytes -= len(text.encode())
            if left_bytes <= 0:
                return

    def _rows(self) -> Iterator[dict[str, Any]]:
        with _one_sentence(self, "read on"):
            yield from map(without_nulls, _load(self))


def _load(source: HubDataset) -> Any:
    found = _load_all(source)
    if source.split is not None:
        return found
    return found["train"] if "train" in found else next(iter(found.values()))


@functools.lru_cache(maxsize=4)  # a build reads the documents of each split twice
def _load_all(source: HubDataset) -> Any:
    """Load the dataset's split, or all of them by name where none is given."""
    if not source.local_files():
        go_offline_if_unreachable()
        # Checked before an import that takes seconds; a missing library comes first.
        if is_offline() and _found("datasets") and not is_cached(source.name, "datasets"):
            raise UserError(_UNREACHABLE.format(f"--data {source.label}", source.name, "file or "))
    needed = f"--data {source.label} needs the library datasets: {how_to_install('hf')}"
    with refused(ImportError, needed):
        import datasets
    streaming = source.stream_bytes is not None
    missing = (
        f"--data {source.label}: there is no dataset {source.name!r} on the Hugging Face Hub, or "
        "it is private: check the name, or log in with `hf auth login`"
    )
    not_found = datasets.exceptions.DatasetNotFoundError
    with _one_sentence(source, "loaded"), refused(not_found, missing):
        return datasets.load_dataset(
            source.name, source.config, split=source.split, streaming=streaming
        )


def _found(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ValueError:  # marked as missing
        return False


@contextlib.contextmanager
def _one_sentence(source: HubDataset, what: str) -> Iterator[None]:
    """Turn the library's exceptions into one sentence; a stream fails while it is read."""
    try:
        yield
    except UserError:
        raise
    except (ConnectionError, TimeoutError) as error:
        raise UserError(
            _UNREACHABLE.format(f"--data {source.label}", source.name, "file or ")
        ) from error
    except Exception as error:
        # Many kinds: unknown configuration or split, a loading script, unreadable files.
        reason = " ".join(str(error).split())
        raise UserError(f"--data {source.label} cannot be {what}: {reason}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonEncoder:
    """A tokenizer of transformers that has no fast form, so no tokenizer.json either."""

    tokenizer: Any
    vocab_size: int
    end_of_text: int
    rows: int
    """Rows of an embedding that text needs."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        found = self.tokenizer(texts, add_special_tokens=False, verbose=False)
        ids: list[list[int]] = found["input_ids"]
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, verbose=False)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return text

    def save(self, path: Path) -> None:
        """Do nothing: this tokenizer has no such form."""


def save_beside(tokenizer: str, folder: Path) -> None:
    """Write the files that transformers keeps beside the tokenizer.json of `hf:NAME`.

    Raises:
        UserError: it cannot be loaded.
    """
    with tempfile.TemporaryDirectory() as saved:
        load_from_transformers(tokenizer).save_pretrained(saved)
        copy_files(files_beside(Path(saved)), Path(saved), folder)


def load_from_transformers(tokenizer: str) -> Any:
    """Load the tokenizer of `hf:NAME`.

    Raises:
        UserError: transformers is missing, or cannot load it.
    """
    name = tokenizer.removeprefix(HUB_PREFIX)
    unreachable = _UNREACHABLE.format(f"tokenizer {tokenizer}", name, "")
    there = Path(name).expanduser().is_dir()
    if not there:
        go_offline_if_unreachable()
        if is_offline() and _found("transformers") and not is_cached(name, "models"):
            raise UserError(unreachable)
    needed = f"tokenizer {tokenizer} needs the library transformers: {how_to_install('hf')}"
    with refused(ImportError, needed):
        from transformers import AutoTokenizer
    files = {path.name for path in Path(name).expanduser().iterdir()} if there else set()
    if _SENTENCEPIECE in files and TOKENIZER_FILE not in files and not _found("sentencepiece"):
        raise UserError(
            f"tokenizer {tokenizer} is a {_SENTENCEPIECE}, which needs the library sentencepiece: "
            "pip install sentencepiece"
        )
    try:
        loaded: Any = AutoTokenizer.from_pretrained(
            str(Path(name).expanduser()),
            trust_remote_code=False,  # not asked on the terminal either
        )
    except Exception as error:
        # Many kinds, and the same one for a wrong name and for no network.
        if is_offline() and not there:
            raise UserError(unreachable) from error
        reason = " ".join(str(error).split())
        fix = f"check the name {name!r} and the network, or give a local folder ({reason})"
        if there:  # the end of the reason may be a package to install
            fix = f"save it again with its tokenizer.json, or give another --tokenizer ({reason})"
        raise UserError(f"tokenizer {tokenizer} cannot be loaded: {fix}") from error
    return loaded
