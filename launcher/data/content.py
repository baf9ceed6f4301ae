"""What names a content: the bytes of files, whatever they are called."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from launcher.data.formats import TEXT_FIELD
from launcher.errors import UserError


def field_key(field: str) -> str:
    """What a field adds to a content key: the usual one nothing."""
    return "" if field == TEXT_FIELD else f" {field}"


def hub_key(name: str) -> str:
    """Names a dataset or tokenizer: a local folder by its content, one on the Hub by its name.

    A warm start must not ask the network, so a change on the Hub is not seen.
    """
    folder = Path(name).expanduser()
    return hash_files(walk(folder)) if folder.is_dir() else name


def hash_files(paths: list[Path] | tuple[Path, ...]) -> str:
    """SHA-256 over the content of the files, in order, and their suffixes (not their names)."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe waits for its other end
                raise UserError(f"{path} is a pipe or a device: give a file, or remove it")
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
        except OSError as error:
            raise unreadable(path, error) from error
        digest.update(path.suffix.lower().encode() + content)
    return digest.hexdigest()


def unreadable(path: Path, error: OSError) -> UserError:
    """For a file that the system does not let us read."""
    return UserError(
        f"{path} cannot be read ({error.strerror or error}): correct or remove the file"
    )


def walk(root: Path, skip: frozenset[str] = frozenset()) -> list[Path]:
    """Files below `root` without hidden ones, sorted by relative path."""
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        # In place: os.walk then does not enter them, and site-packages can hold 100,000 files.
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted(found)
