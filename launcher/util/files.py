"""Files that are replaced as a whole and survive a crash, and folders locked by one process."""

import contextlib
import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from launcher.util.errors import WHY, UserError, refused

CACHE_VARIABLE = "SHARDSCALE_CACHE"


def default_cache_dir() -> Path:
    """Return $SHARDSCALE_CACHE, else shardscale/ in the user's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "shardscale"


def replace_text(path: Path, text: str) -> None:
    """Write `path` as a whole: its readers see what was there before, or all of `text`.

    Raises:
        OSError: it cannot be written; what was there is still there, and nothing else.
    """
    # Nodes that share the folder may have processes of the same number.
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)  # else a crash can leave the name with an empty file
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):  # the room that it took
            temporary.unlink()
        raise


def check_new_file(path: Path) -> None:
    """Refuse, before any work, an output file that is there or cannot be written.

    Raises:
        UserError: it exists, or creating it fails.
    """
    with (
        refused(OSError, f"{path}: cannot be written ({WHY}): choose another"),
        refused(
            FileExistsError, f"{path}: already exists, and nothing is overwritten: choose another"
        ),
    ):
        path.touch(exist_ok=False)
        path.unlink()


def check_writable(path: Path) -> None:
    """Refuse, before any work, an output folder that cannot be made or written; leaves nothing.

    Raises:
        UserError: nothing can be made in the nearest folder of `path` that exists.
    """
    parent = nearest_existing(path)
    if not parent.is_dir():
        raise UserError(f"{path}: {parent} is a file, not a folder; choose another place")
    said = f"{path}: {parent} cannot be written to ({WHY}); choose another place"
    with (
        refused(OSError, said),
        # Only trying tells: root passes every permission check, even on a read-only file system.
        tempfile.TemporaryDirectory(dir=parent, prefix=".shardscale-") as folder,
    ):
        Path(folder, "room").write_bytes(bytes(4096))  # a full disk still makes folders


def is_empty(path: Path) -> bool:
    """Return whether `path` is a folder without anything in it."""
    return path.is_dir() and not any(path.iterdir())


def nearest_existing(path: Path) -> Path:
    """Return `path`, or the closest of its parents that is there (and in no closed folder)."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if os.path.exists(p))


def run_folder_of(checkpoint: Path) -> Path:
    """Return the folder of the run that saved a checkpoint; a link elsewhere is followed."""
    path = checkpoint.absolute()
    return (path if path.parent.name == "checkpoints" else path.resolve()).parent.parent


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_NAME = ".lock"
# Lustre mounted without flock, and NFS without its lock daemon: there runs go unlocked.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
# Not the name in a run folder, which may lie there too: /tmp/shardscale-first is no scratch folder.
_SCRATCH = ".shardscale-scratch"
PREFIX = "shardscale-"


class FolderLock:
    """Lock of a folder, held by the main rank until its process ends, in any way."""

    def __init__(self, folder: Path, name: str = _NAME) -> None:
        self._path = folder / name
        self._file: TextIO | None = None

    def take(self) -> bool:
        """Lock the folder, where its file system has locks; False when a living run has it."""
        import fcntl  # not in a browser's Python, which plans with this file

        # appending: a start that is too late must not empty the holder's line
        file = self._path.open("a", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self._file = file  # closing it would give the lock back
        return True

    @property
    def is_held(self) -> bool:
        """True if this process has taken it."""
        return self._file is not None

    def holder(self) -> str | None:
        """Describe the living run that has locked the folder, if any.

        Raises:
            OSError: that cannot be known, as on a file system without locks.
        """
        import fcntl

        try:
            file = self._path.open(encoding="utf-8")
        except FileNotFoundError:
            return None
        with file:
            try:
                # Shared, so that the agents of several nodes can ask at the same time.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip() or "a process"
        return None

    def left_by(self) -> str | None:
        """Describe the process of this host that locked the folder and has ended; None where it
        lives, or may: locks of another host are not seen on every file system."""
        with contextlib.suppress(OSError):
            if self.holder() is None:
                last = self._path.read_text(encoding="utf-8").strip()
                return last if last.endswith(f" on {socket.gethostname()}") else None
        return None


@contextlib.contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """Create a temporary folder for the block, and remove those of our dead processes."""
    _remove_abandoned()
    # Named last: by its name others find it, and would remove it as long as it is not locked.
    unnamed = Path(tempfile.mkdtemp(prefix=f".{PREFIX}{purpose}-"))
    lock = FolderLock(unnamed, _SCRATCH)
    lock.take()
    folder = unnamed.rename(unnamed.with_name(unnamed.name[1:]))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{_SCRATCH}"):
        folder = lock.parent
        with contextlib.suppress(OSError):  # somebody else was faster
            ours = lock.stat().st_uid == os.getuid()
            # The kernel gives a lock back however its holder ended, also in another container.
            if ours and FolderLock(folder, _SCRATCH).holder() is None:
                shutil.rmtree(folder, ignore_errors=True)
