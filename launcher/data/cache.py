"""Build a folder once among several processes, atomically, with progress on stderr."""

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

from launcher.util.errors import WHY, refused
from launcher.util.files import CACHE_VARIABLE

_WAIT_S = 0.2
_REPORT_EVERY_S = 0.2
_LINE_EVERY_S = 10.0
_CLEAR_LINE = "\r\x1b[K"


Report = Callable[[str, int, int | None], None]
"""A function of a phase, the bytes done of it, and all its bytes: None while they are unknown."""


def build_once(
    directory: Path,
    *,
    is_complete: Callable[[Path], bool],
    build: Callable[[Path, Report], None],
    show_progress: bool,
) -> None:
    """Create `directory` by `build(empty folder, report)` unless a complete one exists.

    Of several concurrent callers, one builds and the others wait. The builder need not be the one
    that shows progress, so progress travels through a small file. The lock dies with its process:
    a killed builder leaves only a folder that the next one removes.

    Raises:
        UserError: the cache folder cannot be written.
    """
    if is_complete(directory):
        return
    said = f"the data cache {directory.parent} cannot be written ({WHY})"
    with refused(OSError, f"{said}: set {CACHE_VARIABLE} to a folder on a disk with room"):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _display(shown=show_progress) as show, _lock(directory, show):
            if not is_complete(directory):
                _build(directory, build, show)


def _build(directory: Path, build: Callable[[Path, Report], None], show: Report) -> None:
    prefix = f"{directory.name}.tmp-"
    # of killed builders: this one holds the lock
    for leftover in directory.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    # Not mkdtemp, whose mode 0700 would lock out others who share the cache.
    work = directory.with_name(f"{prefix}{os.getpid()}")
    work.mkdir()
    shared = _progress_file(directory)
    last_phase, last_s = "", 0.0

    def report(phase: str, done_bytes: int, total_bytes: int | None) -> None:
        """Pass on the first progress of each phase, then at most five per second."""
        nonlocal last_phase, last_s
        now_s = time.monotonic()
        if phase != last_phase or now_s - last_s >= _REPORT_EVERY_S:
            last_phase, last_s = phase, now_s
            shared.write_text(json.dumps((phase, done_bytes, total_bytes)), encoding="utf-8")
            show(phase, done_bytes, total_bytes)

    try:
        build(work, report)
        _return_freed_memory()
        if directory.exists():  # damaged, otherwise it would have been used
            shutil.rmtree(directory)
        work.rename(directory)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        shared.unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(directory: Path, show: Report) -> Iterator[None]:
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
                show(*json.loads(text))
    try:
        yield
    finally:
        lock.release()


def _return_freed_memory() -> None:
    # glibc would keep some 150 MB: the builder is a training process too, whose resident memory is
    # about to be measured.
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


def _progress_file(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.progress")


@contextlib.contextmanager
def _display(*, shown: bool) -> Iterator[Report]:
    """Yield a function that shows the latest progress on stderr: one line that is rewritten on a
    terminal, a line every 10 s in a log."""
    live = sys.stderr.isatty()
    last_phase = ""
    phase_start_s = line_s = 0.0

    def show(phase: str, done: int, total: int | None) -> None:
        nonlocal last_phase, phase_start_s, line_s
        now_s = time.monotonic()
        if phase != last_phase:
            phase_start_s, text = now_s, phase
        elif not live and now_s - line_s < _LINE_EVERY_S:
            return
        elif total is None or not done:
            text = f"{phase}, {done / 1e6:.0f} MB so far"
        else:
            left_s = (now_s - phase_start_s) * (total - done) / done
            text = f"{phase}, {done / total:.0%} of {total / 1e6:.0f} MB, {left_s:.0f} s left"
        last_phase, line_s = phase, now_s
        start, end = (_CLEAR_LINE, "") if live else ("", "\n")
        print(f"{start}data: {text}", end=end, file=sys.stderr, flush=True)

    try:
        yield show if shown else lambda *_: None
    finally:
        if live and last_phase:
            print(end=_CLEAR_LINE, file=sys.stderr, flush=True)
