"""A folder that is there complete, or not there."""

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from launcher.config.resolve import check_run_folder
from launcher.errors import UserError


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """An empty folder beside `out` to write into, which gets the name `out` at the end.

    Raises:
        UserError: `out` exists or cannot be written; nothing is left of the attempt.
    """
    check_run_folder(out)
    temporary = out.parent / f".{out.name}-{secrets.token_hex(4)}"
    try:
        temporary.mkdir(parents=True)
        yield temporary
        temporary.rename(out)
    except OSError as error:
        raise UserError(
            f"--out {out}: cannot be written ({error.strerror or error}); free some room or choose "
            "another place"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
