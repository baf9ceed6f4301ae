"""What a person sees of a sweep: a live table on a terminal, one line per event in a log."""

import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from launcher.compare.sweep.folder import Row, SweepFolder
from launcher.run.folder import RunFolder
from launcher.sizes import duration, gib
from launcher.tables import MUST, Column, fitting, table_of

STYLES = {
    "completed": "green",
    "running": "bold cyan",
    "oom": "yellow",
    "failed": "red",
    "timeout": "red",
    "interrupted": "red",
}
LINES_AROUND_TABLE = 8
COLUMNS = (
    Column(title="cell", rank=MUST, folds=40),
    Column(title="state", rank=MUST),
    Column(title="tokens/s", rank=1, right=True),
    Column(title="peak", rank=2, right=True),
    Column(title="perplexity", rank=3, right=True),
    Column(title="time", rank=4, right=True),
)


class SweepDisplay:
    """Shows `rows` as they change."""

    def __init__(self, rows: Sequence[Row], folder: SweepFolder) -> None:
        self._rows = rows
        self._folder = folder
        self._console = Console(highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._running: Row | None = None
        self._elapsed_s = 0.0
        self._spent_s: list[float] = []
        self._closing = False

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._render, console=self._console, refresh_per_second=2
            )
            self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing = True
        if self._live:
            self._live.__exit__(kind, error, trace)

    def line(self, text: str) -> None:
        """Print one plain line."""
        self._console.print(text, markup=False)
        self._console.file.flush()

    def kept(self, row: Row) -> None:
        """A row that is as it is, without a run."""
        if not self._live:
            how = "" if row.state in ("refused", "unavailable") else " (kept)"
            self.line(f"{self._place(row)}: {outcome(row)}{how}")

    def started(self, row: Row) -> None:
        """A cell's processes start."""
        self._running = row
        self._elapsed_s = 0.0
        if not self._live:
            self.line(f"{self._place(row)}: started{self._left()}")

    def elapsed(self, duration_s: float) -> None:
        """How long the running cell has run."""
        self._elapsed_s = duration_s

    def finished(self, row: Row) -> None:
        """A cell's processes are gone."""
        self._running = None
        if row.duration_s is not None:
            self._spent_s.append(row.duration_s)
        if not self._live:
            self.line(f"{self._place(row)}: {outcome(row)}")

    def _place(self, row: Row) -> str:
        return f"[{self._rows.index(row) + 1}/{len(self._rows)}] {row.cell.name}"

    def _position(self) -> int:
        """Cells are taken in order: how many are behind us."""
        return self._rows.index(self._running) if self._running else 0

    def _left(self) -> str:
        """`, about 4 min left`, from the mean of the cells that ran until now."""
        left = sum(not row.done for row in self._rows[self._position() :])
        if not self._spent_s or not left:
            return ""
        mean_s = sum(self._spent_s) / len(self._spent_s)
        return f", about {duration(max(0.0, mean_s * left - self._elapsed_s))} left"

    def _render(self) -> Group:
        """What there is of the table; while it runs, also what is going on."""
        shown = self._visible()
        cells: list[list[str | Text]] = [
            [row.cell.name, _state(row), *figures(row), self._time(row)] for row in shown
        ]
        kept = fitting(COLUMNS, cells, self._console.width)
        table = table_of(COLUMNS, cells, kept)
        if self._closing:
            reasons = [Text(f"{row.cell.name}: {row.reason}") for row in shown if row.reason]
            return Group(table, *reasons)
        doing = [
            Text(f"{self._doing(row)}", "dim", no_wrap=True, overflow="ellipsis")
            for row in shown
            if row is self._running
        ]
        status = f"{self._position()} of {len(self._rows)} cells are over{self._left()}"
        return Group(table, Text(""), *doing, Text(status, style="dim"))

    def _visible(self) -> Sequence[Row]:
        """All rows at the end; before it, those around the running one that fit the screen."""
        height = max(3, self._console.height - LINES_AROUND_TABLE)
        if self._closing or len(self._rows) <= height or self._running is None:
            return self._rows if self._closing else self._rows[:height]
        middle = self._rows.index(self._running)
        first = min(max(0, middle - height // 2), len(self._rows) - height)
        return self._rows[first : first + height]

    def _time(self, row: Row) -> str:
        if row is self._running:
            return duration(self._elapsed_s)
        return "" if row.duration_s is None else duration(row.duration_s)

    def _doing(self, row: Row) -> str:
        """The last line that the running cell printed, with the part of the run it is in."""
        if row is not self._running:
            return ""
        phase, last = "starting", ""
        with contextlib.suppress(OSError, ValueError):
            status = RunFolder(self._folder.run_folder(row.cell.name)).read_status()
            phase = status["phase"] if status else phase
            with open(self._folder.log(row.cell.name), "rb") as log:
                log.seek(max(0, log.seek(0, 2) - 2000))
                last = next(iter(log.read().decode(errors="replace").splitlines()[::-1]), "")
        return f"{phase}: {last}"


def _state(row: Row) -> Text:
    return Text(row.state, style=STYLES.get(row.state, "dim"))


def figures(row: Row) -> tuple[str, str, str]:
    """(tokens/s, peak, perplexity) as text, empty where there is none."""
    known = row.figures or {}
    rate, perplexity = known.get("tokens_per_s"), known.get("perplexity")
    return (
        f"{rate:,.0f}" if rate else "",
        gib(known["peak_bytes"]) if known.get("peak_bytes") else "",
        f"{perplexity:.2f}" if perplexity else "",
    )


def outcome(row: Row) -> str:
    """How a cell ended, in one line."""
    rate, peak, perplexity = figures(row)
    parts = [
        row.state,
        f"{rate} tokens/s" if rate else "",
        f"peak {peak}" if peak else "",
        f"perplexity {perplexity}" if perplexity else "",
        duration(row.duration_s) if row.duration_s is not None else "",
        row.reason or "",
    ]
    return ", ".join(part for part in parts if part)
