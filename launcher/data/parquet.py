"""Readers of parquet files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.data.formats import check_fields
from launcher.util.errors import UserError, refused
from launcher.util.packages import how_to_install

_ROWS = 1024  # in memory at once: each may be a book


def read_column(path: Path, field: str) -> Iterator[str]:
    """Yield the column `field`, row by row, without nulls.

    Raises:
        UserError: pyarrow is missing, the file is damaged, or there is no such string column.
    """
    with _opened(path) as file:
        import pyarrow as pa

        if not file.metadata.num_rows:  # whatever its columns: it may have been for messages
            return
        schema = file.schema_arrow
        check_fields(schema.names, field, str(path))
        kind = schema.field(field).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise UserError(f"{path}: column {field!r} holds {kind}, it must hold strings")
        for batch in file.iter_batches(batch_size=_ROWS, columns=[field]):
            yield from (text for text in batch.column(0).to_pylist() if text is not None)


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place for error messages, fields) of each row.

    Raises:
        UserError: pyarrow is missing, or the file is damaged.
    """
    number = 0
    with _opened(path) as file:
        for batch in file.iter_batches(batch_size=_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield f"{path} row {number}", without_nulls(row)


def without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without the nulls inside its values: a column of objects has the fields of all
    of them in each, as `tool_calls` in every message, and chat templates would write them."""
    return {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    needed = f"{path} is a parquet file and pyarrow is not installed: {how_to_install('hf')}"
    with refused(ImportError, needed):
        import pyarrow as pa
        import pyarrow.parquet as pq
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{path} cannot be read as parquet ({reason}): write or copy it again"
        ) from error
