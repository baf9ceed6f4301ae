"""Progress of a sweep: a live table on a terminal, one line per event otherwise."""

import contextlib
import time
from collections.abc import Sequence
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from launcher.compare.sweep.sweep_folder import SweepFolder
from launcher.measure.records import SweepRow
from launcher.run.run_folder import RunFolder
from launcher.util.sizes import duration, gib
from launcher.util.tables import MUST, Column, fitting, table_of

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
    """Live view of `rows`."""

    def __init__(self, rows: Sequence[SweepRow], folder: SweepFolder) -> None:
        self._rows = rows
        self._folder = folder
        self._console = Console(highlight=False, soft_wrap=True)
        self._running: SweepRow | None = None
        self._started_s = 0.0
        self._spent_s: list[float] = []
        self._closing = False
        self._is_live = self._console.is_terminal
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=2)

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing = True
        if self._is_live:
            self._live.stop()

    def line(self, text: str) -> None:
        """Print one plain line."""
        self._console.print(text, markup=False)
        self._console.file.flush()

    def kept(self, row: SweepRow) -> None:
        """Report a cell that needs no run."""
        how = "" if row.state in ("refused", "unavailable") else " (kept)"
        self._say(row, f"{outcome(row)}{how}")

    def started(self, row: SweepRow) -> None:
        """Report that a cell's processes start."""
        self._running = row
        self._started_s = time.monotonic()
        self._say(row, f"started{self._left()}")

    def finished(self, row: SweepRow) -> None:
        """Report that a cell's processes have ended."""
        self._running = None
        if row.duration_s is not None:
            self._spent_s.append(row.duration_s)
        self._say(row, outcome(row))

    def _say(self, row: SweepRow, what: str) -> None:
        if not self._is_live:
            self.line(f"[{self._rows.index(row) + 1}/{len(self._rows)}] {row.name}: {what}")

    def _position(self) -> int:
        # Cells run in order.
        return self._rows.index(self._running) if self._running else 0

    def _left(self) -> str:
        """Estimate the remaining time from the mean of finished cells: `, about 4 min left`."""
        left = sum(not row.done for row in self._rows[self._position() :])
        if not self._spent_s or not left:
            return ""
        mean_s = sum(self._spent_s) / len(self._spent_s)
        elapsed_s = time.monotonic() - self._started_s if self._running else 0.0
        return f", about {duration(max(0.0, mean_s * left - elapsed_s))} left"

    def _render(self) -> Group:
        """Render the table, and below it the running cell's status."""
        shown = self._visible()
        cells: list[list[str | Text]] = [
            [
                row.name,
                Text(row.state, style=STYLES.get(row.state, "dim")),
                *figures(row),
                self._time(row),
            ]
            for row in shown
        ]
        table = table_of(COLUMNS, cells, fitting(COLUMNS, cells, self._console.width))
        if self._closing:
            reasons = [Text(f"{row.name}: {row.reason}") for row in shown if row.reason]
            return Group(table, *reasons)
        below = [Text("")]
        if self._running is not None:
            doing = self._doing(self._running)
            below.append(Text(doing, "dim", no_wrap=True, overflow="ellipsis"))
        status = f"{self._position()} of {len(self._rows)} cells done{self._left()}"
        return Group(table, *below, Text(status, style="dim"))

    def _visible(self) -> Sequence[SweepRow]:
        """Select the rows around the running one that fit the screen; all rows at the end."""
        if self._closing:
            return self._rows
        height = max(3, self._console.height - LINES_AROUND_TABLE)
        first = min(max(0, self._position() - height // 2), max(0, len(self._rows) - height))
        return self._rows[first : first + height]

    def _time(self, row: SweepRow) -> str:
        if row is self._running:
            return duration(time.monotonic() - self._started_s)
        return "" if row.duration_s is None else duration(row.duration_s)

    def _doing(self, row: SweepRow) -> str:
        """Return the running cell's phase and the last line of its log."""
        phase, last = "starting", ""
        with contextlib.suppress(OSError, ValueError):
            status = RunFolder(self._folder.run_folder(row.name)).read_status()
            phase = status.get("phase", phase)
            with open(self._folder.log(row.name), "rb") as log:
                log.seek(max(0, log.seek(0, 2) - 2000))  # its last 2000 bytes
                last = next(iter(log.read().decode(errors="replace").splitlines()[::-1]), "")
        return f"{phase}: {last}"


def figures(row: SweepRow) -> tuple[str, str, str]:
    """Format tokens/s, peak and perplexity; empty if unknown."""
    known = row.figures or {}
    rate, perplexity = known.get("tokens_per_s"), known.get("perplexity")
    return (
        f"{rate:,.0f}" if rate else "",
        gib(known["peak_bytes"]) if known.get("peak_bytes") else "",
        f"{perplexity:.2f}" if perplexity else "",
    )


def outcome(row: SweepRow) -> str:
    """Describe in one line how a cell ended."""
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
