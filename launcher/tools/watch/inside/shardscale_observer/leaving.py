"""End a process at once, past the program's own ways of ending."""

from __future__ import annotations

import os
import sys

exit_now = os._exit
"""As it was before the observer followed it."""


def leave(status: int = 0) -> None:
    """End this process: a rehearsal has seen its steps, or can see no more."""
    sys.stdout.flush()
    sys.stderr.flush()
    exit_now(status)
