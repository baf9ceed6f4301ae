"""Files that are there whole, as they were or as they will be, and outlive the machine."""

import contextlib
import os
import socket
from pathlib import Path

from launcher.errors import UserError


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


def sync(path: Path) -> None:
    """Make what a file holds, or the names in a folder, outlive the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
