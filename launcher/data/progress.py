"""Progress of a build: live with the time left on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_REPORT_EVERY_S = 0.2
_LINE_EVERY_S = 10.0


class Progress(NamedTuple):
    """How far a phase is; `total_bytes` is None while the amount of text is not known."""

    phase: str
    done_bytes: int
    total_bytes: int | None


Report = Callable[[Progress], None]


def throttled(report: Report) -> Report:
    """Passes on the first progress of each phase, and then five a second."""
    last_phase, last_s = "", 0.0

    def pass_on(progress: Progress) -> None:
        nonlocal last_phase, last_s
        now_s = time.monotonic()
        if progress.phase != last_phase or now_s - last_s >= _REPORT_EVERY_S:
            last_phase, last_s = progress.phase, now_s
            report(progress)

    return pass_on


class Display:
    """Shows progress on stderr from the first `show` to the end of the `with` block."""

    def __init__(self, *, show: bool) -> None:
        self._visible = show
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._phase = ""
        self._phase_start_s = self._line_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, progress: Progress) -> None:
        """Shows the latest progress, from whichever process it came."""
        if not self._visible:
            return
        if sys.stderr.isatty():
            self._show_live(progress)
        else:
            self._show_line(progress)
        self._phase = progress.phase

    def _show_live(self, progress: Progress) -> None:
        if self._bar is None:
            self._bar = _live_bar()
            self._bar.start()
        if self._task is None or progress.phase != self._phase:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(progress.phase, total=progress.total_bytes)
        self._bar.update(self._task, completed=progress.done_bytes, total=progress.total_bytes)

    def _show_line(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if progress.phase != self._phase:
            self._phase_start_s = self._line_s = now_s
            print(f"data: {progress.phase}", file=sys.stderr, flush=True)
        elif now_s - self._line_s >= _LINE_EVERY_S:
            self._line_s = now_s
            text = _line(progress, now_s - self._phase_start_s)
            print(text, file=sys.stderr, flush=True)


def _line(progress: Progress, elapsed_s: float) -> str:
    phase, done, total = progress
    if total is None or not done:
        return f"data: {phase}, {done / 1e6:.0f} MB so far"
    left_s = elapsed_s * (total - done) / done
    return f"data: {phase}, {done / total:.0%} of {total / 1e6:.0f} MB, {left_s:.0f} s left"


def _live_bar() -> RichProgress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        SpinnerColumn(),
        TextColumn("data: {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
