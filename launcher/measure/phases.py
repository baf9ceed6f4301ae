"""Durations of the phases of a step, without waiting for the device within a step."""

import collections
import contextlib
import time
from collections.abc import Iterator

import torch

from launcher.measure import PHASES
from launcher.measure.records import WARMUP_STEPS

LATEST_STEPS = 10_000  # their median duration is compared with the plan


PhaseTimes = dict[str, float]
"""Seconds of each phase of one step, and `duration_s` of the whole step, by field of StepRecord."""
_NAMES = {phase: f"{phase}_s" for phase in PHASES}


class StepTimes:
    """Step times of a run in bounded memory: the first step, sums, and the latest durations. Sums
    and durations are without the warm-up."""

    def __init__(self) -> None:
        self.count = 0
        self.first_s: PhaseTimes | None = None
        self.steady_s = dict.fromkeys((*_NAMES.values(), "duration_s"), 0.0)
        """Sums over the steps after warm-up."""
        self.durations_s: collections.deque[float] = collections.deque(maxlen=LATEST_STEPS)
        """Latest steps after warm-up."""

    @property
    def steady(self) -> int:
        """Return the number of steps after warm-up."""
        return max(0, self.count - WARMUP_STEPS)

    def add(self, times: PhaseTimes) -> None:
        """Add a step."""
        self.count += 1
        if self.first_s is None:
            self.first_s = times
        if self.steady:
            self.durations_s.append(times["duration_s"])
            for name, value in times.items():
                self.steady_s[name] += value


class PhaseClock:
    """Marks the phases of steps, and reads the marks later.

    On a GPU the marks are CUDA events, stamped by the device; `take` waits for the last one. On a
    CPU they are clock readings.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[str, _Mark, _Mark]] = []
        self._ended: list[tuple[_Mark, _Mark, list[tuple[str, _Mark, _Mark]]]] = []
        self._start = self._mark()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as a phase, which may occur several times in a step."""
        start = self._mark()
        try:
            yield
        finally:
            self._spans.append((name, start, self._mark()))

    def end_step(self) -> None:
        """End the step after its last phase."""
        end = self._mark()
        self._ended.append((self._start, end, self._spans))
        self._spans = []
        self._start = end

    def restart(self) -> None:
        """Exclude the time since the last step (an evaluation) from the next one."""
        self._start = self._mark()

    def take(self) -> list[PhaseTimes]:
        """Return the times of ended steps that were not taken before, oldest first."""
        if self._on_gpu:
            torch.cuda.synchronize()
        ended, self._ended = self._ended, []
        times: list[PhaseTimes] = []
        for start, end, spans in ended:
            spent = dict.fromkeys(_NAMES.values(), 0.0) | {"duration_s": _seconds(start, end)}
            for name, first, last in spans:
                spent[_NAMES[name]] += _seconds(first, last)
            times.append(spent)
        return times

    def _mark(self) -> "_Mark":
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


_Mark = float | torch.cuda.Event


def _seconds(start: _Mark, end: _Mark) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    return float(start.elapsed_time(end)) / 1e3  # CUDA returns ms
