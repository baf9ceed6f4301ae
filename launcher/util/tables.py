"""Tables for a terminal: whole columns are left out where it is narrow, and never cut."""

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
    """A column, and how much it is wanted: where there is no room the highest rank goes first."""

    title: str
    rank: int
    right: bool = False
    folds: int | None = None
    """Text that may go on in further lines from this width on; other cells are always whole."""

    @property
    def name(self) -> str:
        """The title in one line."""
        return self.title.replace(SHY, "")

    @property
    def lines(self) -> list[str]:
        """The title as it stands above the column."""
        return self.title.replace(SHY, "-\n").replace(" ", "\n").split("\n")


Cell = str | Text


def fitting(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int | None
) -> list[int]:
    """Numbers of the columns that fit into `width` cells; all of them without one."""
    used, kept = -GAP, set()
    for number in sorted(range(len(columns)), key=lambda n: columns[n].rank):
        wanted = GAP + _width(columns[number], [row[number] for row in rows], folded=True)
        if width is None or columns[number].rank == MUST or used + wanted <= width:
            used += wanted
            kept.add(number)
    return sorted(kept)


def table_of(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], kept: list[int]) -> Table:
    """The columns `kept` of a table."""
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
    """Print what fits the terminal, and which columns are left out and how else to see them; all
    columns where the reader is a file or a program."""
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
    """Print a sentence; on a terminal it goes on in the next line between two words."""
    console = Console(highlight=False)
    console.print(Text(text), soft_wrap=not console.is_terminal)
    console.file.flush()


def terminal_width() -> int | None:
    """Cells of a line, None where the reader is not a terminal."""
    console = Console()
    return console.width if console.is_terminal else None


def _width(column: Column, cells: Sequence[Cell], *, folded: bool) -> int:
    widest = max((cell_len(str(cell)) for cell in cells), default=0)
    if folded and column.folds is not None:
        widest = min(widest, column.folds)
    return max(widest, *(cell_len(line) for line in column.lines))
