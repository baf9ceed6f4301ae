"""Datasets of the Hugging Face `datasets` library, loaded whole or read as a stream."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from launcher.data.formats import check_fields, field_key, hub_files, hub_key
from launcher.util.errors import UserError
from launcher.util.packages import how_to_install

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

    def local_files(self) -> list[Path]:
        """Those of a local folder."""
        return hub_files(self.name)

    def content_key(self, memo_dir: Path) -> str:
        """The name, or the content of a local folder, and what is read of it."""
        part = f" @{self.split}" if self.split else ""
        part += f" first {self.stream_bytes}" if self.stream_bytes else ""
        return f"{hub_key(self.name)} {self.config}{part}{field_key(self.field)}"

    def texts(self) -> Iterator[str]:
        """One per row."""
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
        with _said(self, "read on"):
            for row in _load(self):
                check_fields(row, self.field, self.label)
                text = "" if row[self.field] is None else row[self.field]
                if not isinstance(text, str):
                    kind = type(text).__name__
                    raise UserError(
                        f"{self.label}: column {self.field!r} holds {kind}, not strings"
                    )
                yield text
                left_bytes -= len(text.encode())
                if left_bytes <= 0:
                    return


@functools.lru_cache(maxsize=1)  # a build reads the documents twice
def _load(source: HubDataset) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"--data {source.label} needs the library datasets: {how_to_install('hf')}"
        ) from error
    streaming = source.stream_bytes is not None
    with _said(source, "loaded"):
        try:
            found = datasets.load_dataset(
                source.name, source.config, split=source.split, streaming=streaming
            )
        except datasets.exceptions.DatasetNotFoundError as error:
            raise UserError(
                f"--data {source.label}: there is no dataset {source.name!r} on the Hugging Face "
                "Hub, or it is private: check the name, or log in with `hf auth login`"
            ) from error
    if source.split is not None:
        return found
    return found["train"] if "train" in found else next(iter(found.values()))


@contextlib.contextmanager
def _said(source: HubDataset, what: str) -> Iterator[None]:
    """Make one sentence of what the library raises; a stream's failures come while it is read."""
    try:
        yield
    except UserError:
        raise
    except (ConnectionError, TimeoutError) as error:
        raise UserError(
            f"--data {source.label}: the Hugging Face Hub cannot be reached and {source.name!r} is "
            "not in its local cache: connect to the network, or give a local file or folder"
        ) from error
    except Exception as error:
        # Of many kinds: an unknown configuration or split, a loading script, files that cannot be
        # parsed.
        reason = " ".join(str(error).split())
        raise UserError(f"--data {source.label} cannot be {what}: {reason}") from error
