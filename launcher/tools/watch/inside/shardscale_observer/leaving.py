"""End a process at once, past the program's own ways of ending."""

from __future__ import annotations

import os
import sys
from typing import Any

exit_now = os._exit
"""As it was before the observer followed it."""


def leave(status: int = 0) -> None:
    """End this process: a rehearsal has seen its steps, or can see no more."""
    bars: Any = sys.modules.get("tqdm.std")
    if bars is not None and any(not bar.disable for bar in getattr(bars.tqdm, "_instances", ())):
        print(file=sys.stderr)  # the report is to begin on a line of its own
    sys.stdout.flush()
    sys.stderr.flush()
    exit_now(status)
