"""Temporary folders of ours, which the next run removes where a killed one could not."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from launcher.folder_lock import FolderLock

PREFIX = "shardscale-"


@contextlib.contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """A folder that goes when the block ends; those of dead processes of ours go now."""
    _remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-"))
    lock = FolderLock(folder)
    lock.take()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/.lock"):
        folder = lock.parent
        with contextlib.suppress(OSError):  # somebody else was faster
            ours = lock.stat().st_uid == os.getuid()
            # The kernel gives a lock back however its holder ended, also in another container.
            if ours and FolderLock(folder).holder() is None:
                shutil.rmtree(folder, ignore_errors=True)
