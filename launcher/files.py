"""Files that are there whole, as they were or as they will be, and outlive the machine; JSON."""

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any

from launcher.errors import UserError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of transformers.

    Raises:
        UserError: it cannot be read, or holds something else.
    """
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); give a folder that transformers' "
            "save_pretrained has written"
        ) from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: is not valid JSON; fetch it again") from None
    if not isinstance(document, dict):
        raise UserError(f"{path}: holds no JSON object; fetch it again")
    return document


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


def sync(path: Path) -> None:
    """Make what a file holds, or the names in a folder, outlive the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
