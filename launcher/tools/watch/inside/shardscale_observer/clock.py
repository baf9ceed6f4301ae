"""Durations of a step's phases, without waiting for the device."""

from __future__ import annotations

import collections
import time
from typing import Any

PHASES = ("data", "forward", "backward", "step", "other")
"""`other` is time between them: logging, clipping, a library's own work."""
APART = ("evaluation", "checkpoint")
"""Phases whose time is no part of a step's."""


class Clock:
    """Spans of phases, and ended steps whose marks the device has perhaps not reached yet.

    On a GPU a mark is a CUDA event, on a CPU a reading of the clock; with `timed` False, as on a
    null GPU that runs no kernel, durations are unknown.
    """

    def __init__(self, torch: Any, *, on_gpu: bool, timed: bool) -> None:
        self._torch = torch
        self._on_gpu = on_gpu
        self._timed = timed
        self._spans: list[tuple[str, Any, Any]] = []
        self._since = self._mark()
        self._ended: collections.deque[tuple[list[tuple[str, Any, Any]], Any]] = collections.deque()

    def close(self, phase: str) -> None:
        """End a phase now; the next begins."""
        now = self._mark()
        self._spans.append((phase, self._since, now))
        self._since = now

    def end_step(self, content: Any) -> None:
        """End a step with its last `step` phase; spans after it belong to the next. Without one, as
        where weights are updated inside of backward, it ends now."""
        steps = [n for n, (phase, _, _) in enumerate(self._spans) if phase == "step"]
        last = max(steps, default=len(self._spans) - 1)
        self._ended.append((self._spans[: last + 1], content))
        self._spans = self._spans[last + 1 :]

    def drop(self) -> None:
        """Forget spans that belong to no step."""
        self._spans = []

    def take(self, *, wait: bool = False) -> list[tuple[dict[str, float | None], Any]]:
        """Return (seconds by field, content) of ended steps that the device has completed."""
        taken = []
        while self._ended and (wait or self._reached(self._ended[0][0])):
            spans, content = self._ended.popleft()
            taken.append((self._seconds(spans), content))
        return taken

    def _reached(self, spans: list[tuple[str, Any, Any]]) -> bool:
        return not (self._on_gpu and self._timed and spans) or bool(spans[-1][2].query())

    def _seconds(self, spans: list[tuple[str, Any, Any]]) -> dict[str, float | None]:
        if not self._timed:
            return {f"{name}_s": None for name in ("duration", *PHASES)}
        totals: dict[str, float | None] = {f"{name}_s": 0.0 for name in ("duration", *PHASES)}
        if self._on_gpu and spans:
            # elapsed_time raises before the device has passed both events
            spans[-1][2].synchronize()
        for phase, start, end in spans:
            taken = start.elapsed_time(end) / 1e3 if self._on_gpu else end - start
            for name in (f"{phase}_s", *(() if phase in APART else ("duration_s",))):
                if name in totals:
                    totals[name] = (totals[name] or 0.0) + taken
        return totals

    def _mark(self) -> Any:
        if not self._timed:
            return None
        if not self._on_gpu:
            return time.perf_counter()
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event
