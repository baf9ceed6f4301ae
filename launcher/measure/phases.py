"""How long each phase of a step takes, without waiting for the device inside the step."""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

PHASES = ("data", "forward", "backward", "step")
LATEST_STEPS = 10_000  # whose median duration is held against the plan


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTimes:
    """Seconds spent in each phase of one step, and in the step as a whole."""

    data_s: float
    forward_s: float
    backward_s: float
    step_s: float
    duration_s: float


class StepTimes:
    """Times of all steps of a run, in bounded memory: the first step, sums and a window.

    Args:
        warmup: steps that are left out of sums and durations.
    """

    def __init__(self, warmup: int) -> None:
        self._warmup = warmup
        self.count = 0
        self.first_s: dict[str, float] | None = None
        self.steady_s = {field.name: 0.0 for field in dataclasses.fields(PhaseTimes)}
        """Sums over the steps after the warm-up, by field of PhaseTimes."""
        self.durations_s: collections.deque[float] = collections.deque(maxlen=LATEST_STEPS)
        """Of the latest steps after the warm-up."""

    @property
    def steady(self) -> int:
        """Steps after the warm-up."""
        return max(0, self.count - self._warmup)

    def add(self, times: PhaseTimes) -> None:
        """Count one more step."""
        self.count += 1
        values = dataclasses.asdict(times)
        if self.first_s is None:
            self.first_s = values
        if self.steady:
            self.durations_s.append(times.duration_s)
            for name, value in values.items():
                self.steady_s[name] += value


class PhaseClock:
    """Marks the phases of steps; reads the marks later, when somebody wants the numbers.

    On a GPU the marks are CUDA events, which the device stamps as it gets there; `times` waits
    for the last one. On a CPU they are clock readings.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[str, _Mark, _Mark]] = []
        self._ended: list[tuple[_Mark, _Mark, list[tuple[str, _Mark, _Mark]]]] = []
        self._start = self._mark()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside; a phase may come several times in a step."""
        start = self._mark()
        try:
            yield
        finally:
            self._spans.append((name, start, self._mark()))

    def end_step(self) -> None:
        """The step's last phase is over."""
        end = self._mark()
        self._ended.append((self._start, end, self._spans))
        self._spans = []
        self._start = end

    def restart(self) -> None:
        """Leave what happened since the last step (an evaluation) out of the next one."""
        self._start = self._mark()

    def take(self) -> list[PhaseTimes]:
        """The times of all ended steps that were not taken before, oldest first."""
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
    return float(start.elapsed_time(end)) / 1e3
