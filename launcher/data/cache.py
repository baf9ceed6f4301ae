"""One folder per corpus, built once by whoever comes first, there completely or not at all.

What the user sees meanwhile is live with the time left on a terminal, and plain lines in a log.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from launcher.util.errors import UserError

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

CACHE_VARIABLE = "SHARDSCALE_CACHE"
_WAIT_S = 0.2
_REPORT_EVERY_S = 0.2
_LINE_EVERY_S = 10.0


class Progress(NamedTuple):
    """How far a phase is; `total_bytes` is None while the amount of text is not known."""

    phase: str
    done_bytes: int
    total_bytes: int | None


Report = Callable[[Progress], None]


def default_cache_dir() -> Path:
    """$SHARDSCALE_CACHE, else shardscale/ in the user's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "shardscale"


def build_once(
    directory: Path,
    *,
    is_complete: Callable[[Path], bool],
    build: Callable[[Path, Report], None],
    show_progress: bool,
) -> None:
    """Makes `directory` by `build(empty folder, report)` unless a complete one is there.

    Of several processes that call this at once, one builds and the others wait. The one that
    builds need not be the one that shows progress, so progress travels through a small file. The
    lock dies with its process: a killed builder leaves only a folder that the next one removes.

    Raises:
        UserError: the cache folder cannot be written.
    """
    if is_complete(directory):
        return
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _Display(shown=show_progress) as display, _lock(directory, display):
            if not is_complete(directory):
                _build(directory, build, display)
    except OSError as error:
        raise UserError(
            f"the data cache {directory.parent} cannot be written ({error.strerror or error}): "
            f"set {CACHE_VARIABLE} to a folder on a disk with room"
        ) from error


def _build(directory: Path, build: Callable[[Path, Report], None], display: _Display) -> None:
    prefix = f"{directory.name}.tmp-"
    for leftover in directory.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    # Not mkdtemp, whose 0700 would shut out the others who share a cache. The lock is held.
    work = directory.with_name(f"{prefix}{os.getpid()}")
    work.mkdir()
    shared = _progress_file(directory)
    last_phase, last_s = "", 0.0

    def report(progress: Progress) -> None:
        """Pass on the first progress of each phase, and then five a second."""
        nonlocal last_phase, last_s
        now_s = time.monotonic()
        if progress.phase != last_phase or now_s - last_s >= _REPORT_EVERY_S:
            last_phase, last_s = progress.phase, now_s
            shared.write_text(json.dumps(progress), encoding="utf-8")
            display.show(progress)

    try:
        build(work, report)
        _return_freed_memory()
        if directory.exists():  # damaged, or it would have been taken
            shutil.rmtree(directory)
        work.rename(directory)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        shared.unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(directory: Path, display: _Display) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(f"{directory}.lock")
    while True:
        try:
            lock.acquire(timeout=_WAIT_S)
            break
        except Timeout:
            # The file may be half written or just gone.
            with contextlib.suppress(OSError, ValueError):
                text = _progress_file(directory).read_text(encoding="utf-8")
                display.show(Progress(*json.loads(text)))
    try:
        yield
    finally:
        lock.release()


def _return_freed_memory() -> None:
    """Gives back some 150 MB that glibc would keep: the builder is a training process too, whose
    resident memory is about to be measured."""
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def _progress_file(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.progress")


class _Display:
    """Shows progress on stderr from the first `show` to the end of the `with` block."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._bar: RichProgress | None = None
        self._phase = ""
        self._phase_start_s = self._line_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, progress: Progress) -> None:
        """Shows the latest progress, from whichever process it came."""
        if self._shown and sys.stderr.isatty():
            self._show_live(progress)
        elif self._shown:
            self._show_line(progress)
        self._phase = progress.phase

    def _show_live(self, progress: Progress) -> None:
        phase, done, total = progress
        if self._bar is None:
            self._bar = _live_bar()
            self._bar.start()
        if phase != self._phase:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(phase, total=total)
        self._bar.update(self._bar.task_ids[0], completed=done, total=total)

    def _show_line(self, progress: Progress) -> None:
        phase, done, total = progress
        now_s = time.monotonic()
        if phase != self._phase:
            self._phase_start_s = self._line_s = now_s
            text = phase
        elif now_s - self._line_s < _LINE_EVERY_S:
            return
        elif total is None or not done:
            text = f"{phase}, {done / 1e6:.0f} MB so far"
        else:
            left_s = (now_s - self._phase_start_s) * (total - done) / done
            text = f"{phase}, {done / total:.0%} of {total / 1e6:.0f} MB, {left_s:.0f} s left"
        self._line_s = now_s
        print(f"data: {text}", file=sys.stderr, flush=True)


def _live_bar() -> RichProgress:
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.SpinnerColumn(),
        progress.TextColumn("data: {task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
