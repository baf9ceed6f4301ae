"""Tables for a terminal: a narrow one omits whole columns, and never cuts one."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

GAP = 2
MUST = 0
"""The rank of columns that no terminal is too narrow for."""
SHY = "\N{SOFT HYPHEN}"
"""In a title: where it may go on in a second line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column and its priority: where space is short the highest rank is left out first."""

    title: str
    rank: int
    right: bool = False
    folds: int | None = None
    """Text that may go on in further lines from this width on; other cells are always whole."""

    @property
    def name(self) -> str:
        """Title in one line."""
        return self.title.replace(SHY, "")

    @property
    def lines(self) -> list[str]:
        """Title as the lines above the column."""
        return self.title.replace(SHY, "-\n").replace(" ", "\n").split("\n")


Cell = str | Text


def fitting(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int | None
) -> list[int]:
    """Return the numbers of the columns that fit into `width` cells; all of them without one."""
    used, kept = -GAP, set()
    for number in sorted(range(len(columns)), key=lambda n: columns[n].rank):
        wanted = GAP + _width(columns[number], [row[number] for row in rows], folded=True)
        if width is None or columns[number].rank == MUST or used + wanted <= width:
            used += wanted
            kept.add(number)
    return sorted(kept)


def table_of(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], kept: list[int]) -> Table:
    """Build a table of the columns `kept`."""
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for column in (columns[number] for number in kept):
        table.add_column(
            Text("\n".join(column.lines)),
            justify="right" if column.right else "left",
            vertical="top",
            no_wrap=column.folds is None,
            overflow="fold",
        )
    for row in rows:
        table.add_row(
            *(Text(cell) if isinstance(cell, str) else cell for cell in map(row.__getitem__, kept))
        )
    return table


def print_table(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], *, otherwise: str
) -> None:
    """Print the columns that fit the terminal and name the omitted ones; print all columns to a
    file or program."""
    width = terminal_width()
    kept = fitting(columns, rows, width)
    # Wider than the terminal only where even what must be shown is: it folds lines, and cuts none.
    needed = -GAP + sum(
        GAP + _width(columns[n], [row[n] for row in rows], folded=width is not None) for n in kept
    )
    console = Console(highlight=False, width=max(needed, width or 0))
    console.print(table_of(columns, rows, kept))
    left_out = [column.name for n, column in enumerate(columns) if n not in kept]
    if left_out:
        say(f"not shown in {width} columns: {', '.join(left_out)}; {otherwise}")


def say(text: str) -> None:
    """Print a sentence; a terminal wraps it between words."""
    console = Console(highlight=False)
    console.print(Text(text), soft_wrap=not console.is_terminal)
    console.file.flush()


def terminal_width() -> int | None:
    """Return the cells of a line, or None if stdout is no terminal."""
    console = Console()
    return console.width if console.is_terminal else None


def _width(column: Column, cells: Sequence[Cell], *, folded: bool) -> int:
    widest = max((cell_len(str(cell)) for cell in cells), default=0)
    if folded and column.folds is not None:
        widest = min(widest, column.folds)
    return max(widest, *(cell_len(line) for line in column.lines))
