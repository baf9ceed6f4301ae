"""What a person sees while a plan is made: a line that is rewritten on a terminal, few lines in a
log. On stderr, so that the plan itself can be piped."""

import sys
import time

from launcher.sizes import duration

_LINE_EVERY_S = 15.0


class Waiting:
    """How many choices are assessed, and how long the rest will take."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._started_s = self._said_s = time.monotonic()
        self._shown = ""

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` are over."""
        now_s = time.monotonic()
        elapsed_s = now_s - self._started_s
        left = f", about {duration(elapsed_s * (total - done) / done)} left" if done else ""
        text = f"planning: {done} of {total} choices, {duration(elapsed_s)}{left}"
        if self._live and text != self._shown:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            self._shown = text
        elif not self._live and now_s - self._said_s >= _LINE_EVERY_S:
            print(text, file=sys.stderr, flush=True)
            self._said_s = now_s

    def close(self) -> None:
        """Take the line away."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
