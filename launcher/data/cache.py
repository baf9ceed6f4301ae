"""One folder per corpus, built once by whoever comes first, there completely or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from launcher.data.progress import Display, Progress, Report, throttled
from launcher.errors import UserError

CACHE_VARIABLE = "SHARDSCALE_CACHE"
_WAIT_S = 0.2


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
        with Display(show=show_progress) as display, _lock(directory, display):
            if not is_complete(directory):
                _build(directory, build, display)
    except OSError as error:
        raise UserError(
            f"the data cache {directory.parent} cannot be written ({error.strerror or error}): "
            f"set {CACHE_VARIABLE} to a folder on a disk with room"
        ) from error


def write_atomically(path: Path, text: str) -> None:
    """Writes `text` to `path`, making its folder; readers see the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    written.write_text(text, encoding="utf-8")
    written.replace(path)


def _build(directory: Path, build: Callable[[Path, Report], None], display: Display) -> None:
    prefix = f"{directory.name}.tmp-"
    for leftover in directory.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    # Not mkdtemp, whose 0700 would shut out the others who share a cache. The lock is held.
    work = directory.with_name(f"{prefix}{os.getpid()}")
    work.mkdir()
    shared = _progress_file(directory)

    def report(progress: Progress) -> None:
        shared.write_text(json.dumps(progress), encoding="utf-8")
        display.show(progress)

    try:
        build(work, throttled(report))
        _return_freed_memory()
        if directory.exists():  # damaged, or it would have been taken
            shutil.rmtree(directory)
        work.rename(directory)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        shared.unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(directory: Path, display: Display) -> Iterator[None]:
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
