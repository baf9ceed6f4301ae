"""Records that show themselves as a table, on a terminal and in a notebook."""

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from launcher.util.sizes import gib


class Table(Sequence[Mapping[str, Any]]):
    """Records in order. `table[0]` is a record; `to_pandas()` makes a DataFrame of all."""

    def __init__(self, records: Iterable[Mapping[str, Any]], columns: Sequence[str] = ()) -> None:
        """Keep records; `columns` are those that are shown, all plain ones by default."""
        self.records: list[dict[str, Any]] = [dict(record) for record in records]
        self._columns = columns

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        return self.records[index]

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.records)

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame, a column per field.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise ImportError("to_pandas() needs pandas: pip install pandas") from None
        return pandas.DataFrame(self.records)

    @property
    def columns(self) -> list[str]:
        """Names of the fields that are shown."""
        plain = dict.fromkeys(
            name
            for record in self.records
            for name, value in record.items()
            if not isinstance(value, Mapping | list | tuple)
        )
        return [name for name in self._columns or plain if name in plain]

    def __repr__(self) -> str:
        head = [name.removesuffix("_bytes") for name in self.columns]
        rows = [head, *([_shown(r.get(n), n) for n in self.columns] for r in self.records)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(n.removesuffix('_bytes'))}</th>" for n in self.columns)
        rows = "".join(f"<tr>{''.join(self._cells(record))}</tr>" for record in self.records)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"

    def _cells(self, record: Mapping[str, Any]) -> Iterator[str]:
        for name in self.columns:
            yield f"<td>{html.escape(_shown(record.get(name), name))}</td>"


def _shown(value: Any, name: str) -> str:
    if value is None:
        return "n/a"
    if name.endswith("_bytes") and isinstance(value, int):
        return gib(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
