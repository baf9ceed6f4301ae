"""Durations of the phases of a step, without waiting for the device within a step."""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from launcher.measure import PHASES
from launcher.measure.records import WARMUP_STEPS

LATEST_STEPS = 10_000  # their median duration is compared with the plan


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTimes:
    """Seconds of each phase of one step, and of the whole step."""

    data_s: float
    forward_s: float
    backward_s: float
    step_s: float
    duration_s: float


class StepTimes:
    """Step times of a run in bounded memory: the first step, sums, and the latest durations. Sums
    and durations are without the warm-up."""

    def __init__(self) -> None:
        self.count = 0
        self.first_s: dict[str, float] | None = None
        self.steady_s = {field.name: 0.0 for field in dataclasses.fields(PhaseTimes)}
        """Sums over the steps after warm-up, by field of PhaseTimes."""
        self.durations_s: collections.deque[float] = collections.deque(maxlen=LATEST_STEPS)
        """Latest steps after warm-up."""

    @property
    def steady(self) -> int:
        """Return the number of steps after warm-up."""
        return max(0, self.count - WARMUP_STEPS)

    def add(self, times: PhaseTimes) -> None:
        """Add a step."""
        self.count += 1
        values = dataclasses.asdict(times)
        if self.first_s is None:
            self.first_s = values
        if self.steady:
            self.durations_s.append(times.duration_s)
            for name, value in values.items():
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
        times = []
        for start, end, spans in ended:
            in_phases = {f"{name}_s": 0.0 for name in PHASES}
            for name, first, last in spans:
                in_phases[f"{name}_s"] += _seconds(first, last)
            times.append(PhaseTimes(duration_s=_seconds(start, end), **in_phases))
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
