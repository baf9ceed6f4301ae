"""Console of the main rank: plain lines, and on a terminal progress bars with ETA."""

import contextlib
import time
from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

LEVELS = ("debug", "info", "warning", "error")
_LINE_EVERY_S = 10.0


class RunConsole:
    """Console output; silent on all ranks but the main one.

    Args:
        log_level: the lowest of `LEVELS` that is shown before the end.
    """

    def __init__(self, *, enabled: bool, log_level: str = "info") -> None:
        self._enabled = enabled
        self._from = LEVELS.index(log_level)
        # soft_wrap: a line stays one line, however narrow the terminal is
        self._console = Console(highlight=False, soft_wrap=True)
        self._live = enabled and self._shows("info") and self._console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            refresh_per_second=2,
        )
        self._tasks: dict[str, TaskID] = {}
        self._test_began_s = self._test_line_s = 0.0

    def bars(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that shows progress bars on a terminal."""
        return self._progress if self._live else contextlib.nullcontext()

    def _shows(self, level: str) -> bool:
        return LEVELS.index(level) >= self._from

    def at_the_end(self) -> None:
        """Show every line from now on: they are the outcome of the run."""
        self._from = 0

    def lines(self, texts: Iterable[str | Text]) -> None:
        """Print plain lines."""
        for text in texts:
            self.line(text)

    def line(self, text: str | Text, level: str = "info") -> None:
        """Print one plain line."""
        if self._enabled and self._shows(level):
            self._progress.console.print(text, markup=False)  # [brackets] are no styles
            self._console.file.flush()

    def figures(self, values: Mapping[str, str]) -> None:
        """Print `step: 10  loss: 5.2134  ...`, as other trainers do."""
        self.line("  ".join(f"{name}: {value}" for name, value in values.items()))

    def progress(self, name: str, done: int, total: int) -> None:
        """Show that `done` of `total` are finished; a full bar is removed."""
        if not self._live:
            return
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total)
        self._progress.update(self._tasks[name], completed=done)
        if done >= total:
            self._progress.remove_task(self._tasks.pop(name))

    def testing(self, done: int, total: int) -> None:
        """Show progress through the test split; in a log, a line every 10 seconds."""
        self.progress("testing", done, total)
        now_s = time.monotonic()
        if done == 1:  # may compile, and is left out of the rate
            self._test_began_s = self._test_line_s = now_s
        elif not self._live and now_s - self._test_line_s >= _LINE_EVERY_S:
            self._test_line_s = now_s
            left_s = (now_s - self._test_began_s) / (done - 1) * (total - done)
            self.line(f"testing: {done:,} of {total:,} batches, {left_s:.0f} s left")


def percent(part: float, whole: float | None) -> str:
    """Format a ratio in percent, `n/a` if the whole is unknown."""
    return f"{100 * part / whole:.1f}%" if whole else "n/a"
