"""Datasets of the Hugging Face `datasets` library, loaded whole or read as a stream."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from launcher.data.content import field_key, hub_key
from launcher.data.formats import check_columns, documents
from launcher.errors import UserError
from launcher.extras import how_to_install

if TYPE_CHECKING:
    from pathlib import Path

HUB_PREFIX = "hf:"


@dataclass(frozen=True, kw_only=True, slots=True)
class HubDataset:
    """A dataset of the `datasets` library: the split that is named, else `train`, else its first.

    `stream_bytes`: so much of the text is read, from its beginning, and the rest is not downloaded.
    """

    label: str
    name: str
    config: str | None
    split: str | None
    field: str
    stream_bytes: int | None

    @classmethod
    def named(cls, data: str, field: str, stream_bytes: int | None) -> Self:
        """The dataset of `hf:NAME[:CONFIG][@SPLIT]`.

        Raises:
            UserError: no name.
        """
        name, at, split = data.removeprefix(HUB_PREFIX).rpartition("@")
        if not at or "/" in split:  # a folder's own @
            name, split = data.removeprefix(HUB_PREFIX), ""
        name, _, config = name.partition(":")
        if not name:
            raise UserError(
                f"--data {data} names no dataset: write hf:NAME, hf:NAME:CONFIG or hf:NAME@SPLIT"
            )
        return cls(
            label=data,
            name=name,
            config=config or None,
            split=split or None,
            field=field,
            stream_bytes=stream_bytes,
        )

    def content_key(self, memo_dir: Path) -> str:
        """The name, or the content of a local folder, and what is read of it."""
        part = f" @{self.split}" if self.split else ""
        part += f" first {self.stream_bytes}" if self.stream_bytes else ""
        return f"{hub_key(self.name)} {self.config}{part}{field_key(self.field)}"

    def documents(self) -> Iterator[str]:
        """A document per row."""
        return documents(self._texts())

    def _texts(self) -> Iterator[str]:
        if self.stream_bytes is None:
            yield from self._whole()
            return
        left = self.stream_bytes
        for text in self._streamed():
            yield text
            left -= len(text.encode())
            if left <= 0:
                return

    def _whole(self) -> Iterator[str]:
        table = _load(self.label, self.name, self.config, self.split, streaming=False)
        check_columns(table.column_names, self.field, self.label)
        kind = table.features[self.field]
        if getattr(kind, "dtype", None) not in ("string", "large_string"):
            raise UserError(f"{self.label}: column {self.field!r} holds {kind}, not strings")
        for batch in table.with_format("arrow").iter(batch_size=1000):
            yield from (text or "" for text in batch.column(self.field).to_pylist())

    def _streamed(self) -> Iterator[str]:
        rows = _load(self.label, self.name, self.config, self.split, streaming=True)
        for row in _readable(self.label, self.name, rows):
            check_columns(list(row), self.field, self.label)
            text = row[self.field]
            if text is not None and not isinstance(text, str):
                kind = type(text).__name__
                raise UserError(f"{self.label}: column {self.field!r} holds {kind}, not strings")
            yield text or ""


@functools.lru_cache(maxsize=1)  # a build reads the documents twice
def _load(label: str, name: str, config: str | None, split: str | None, *, streaming: bool) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"--data {label} needs the library datasets: {how_to_install('hf')}"
        ) from error
    try:
        found = datasets.load_dataset(name, config, split=split, streaming=streaming)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise UserError(
            f"--data {label}: there is no dataset {name!r} on the Hugging Face Hub, or it is "
            "private: check the name, or log in with `hf auth login`"
        ) from error
    except (ConnectionError, TimeoutError) as error:
        raise _unreachable(label, name) from error
    except Exception as error:
        # Of many kinds: an unknown configuration or split, a loading script, files that cannot be
        # parsed.
        reason = " ".join(str(error).split())
        raise UserError(f"--data {label} cannot be loaded: {reason}") from error
    if split is not None:
        return found
    return found["train"] if "train" in found else next(iter(found.values()))


def _readable(label: str, name: str, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of a stream, whose failures come while it is read."""
    try:
        yield from rows
    except (ConnectionError, TimeoutError) as error:
        raise _unreachable(label, name) from error
    except UserError:
        raise
    except Exception as error:  # of as many kinds
        reason = " ".join(str(error).split())
        raise UserError(f"--data {label} cannot be read on: {reason}") from error


def _unreachable(label: str, name: str) -> UserError:
    return UserError(
        f"--data {label}: the Hugging Face Hub cannot be reached and {name!r} is not in its "
        "local cache: connect to the network, or give a local file or folder"
    )
