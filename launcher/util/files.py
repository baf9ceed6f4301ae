"""Files that are there whole, as they were or as they will be, and outlive the machine."""

import contextlib
import os
import socket
import tempfile
from pathlib import Path

from launcher.util.errors import UserError


def replace_text(path: Path, text: str) -> None:
    """Write `path` as a whole: its readers see what was there before, or all of `text`.

    Raises:
        OSError: it cannot be written; what was there is still there, and nothing else.
    """
    # Nodes that share the folder may have processes of the same number.
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
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
    try:
        path.touch(exist_ok=False)
        path.unlink()
    except FileExistsError:
        raise UserError(
            f"{path}: already exists, and nothing is overwritten: choose another"
        ) from None
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror or error}): choose another"
        ) from None


def check_writable(path: Path) -> None:
    """Refuse, before any work, an output folder that cannot be made or written; leaves nothing.

    Raises:
        UserError: nothing can be made in the nearest folder of `path` that exists.
    """
    parent = nearest_existing(path)
    if not parent.is_dir():
        raise UserError(f"{path}: {parent} is a file, not a folder; choose another place")
    try:
        # Only trying tells: root passes every permission check, even on a read-only file system.
        with tempfile.TemporaryDirectory(dir=parent, prefix=".shardscale-") as folder:
            Path(folder, "room").write_bytes(bytes(4096))  # a full disk still makes folders
    except OSError as error:
        raise UserError(
            f"{path}: {parent} cannot be written to ({error.strerror}); choose another place"
        ) from None


def nearest_existing(path: Path) -> Path:
    """Return `path`, or the closest of its parents that is there (and in no closed folder)."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if os.path.exists(p))


def sync(path: Path) -> None:
    """Make what a file holds, or the names in a folder, outlive the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
