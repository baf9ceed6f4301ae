"""Sample this rank's GPU during training: memory often, other readings less often.

A daemon thread reads NVML at absolute deadlines and passes records to `emit`; it does no I/O, and
nothing waits for it. Memory is read far more often than a record is made, and the record holds the
maximum since the last one, so that no peak is missed. A reading that fails is None in the sample,
reported once in an event, and retried later. Without NVML, the resident set of the process is
sampled instead.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import psutil
import torch

from launcher.measure.records import EventRecord, GpuRecord, SamplerSummary
from launcher.util.json_file import Record

if TYPE_CHECKING:  # pynvml is imported where there is a GPU
    from launcher.measure.gpu_readings import EnergyReading, GpuReadings

Values = dict[str, Any]  # fields of GpuRecord
MAXIMA = ("memory_used_bytes", "host_rss_bytes")  # since the last record; others: the newest
STOP_WAIT_S = 1.0  # a thread whose NVML call hangs for longer is abandoned


class Grid:
    """Ticks at start + k * period, in whole nanoseconds, so that errors do not accumulate.

    `missed` counts the ticks that were not taken before the next one was due.
    """

    def __init__(self, start_ns: int, period_ns: int) -> None:
        self._start_ns = start_ns
        self._period_ns = period_ns
        self._tick = 0
        self.missed = 0

    @property
    def next_ns(self) -> int:
        """Return the deadline of the next tick."""
        return self._start_ns + self._tick * self._period_ns

    def take(self, now_ns: int) -> bool:
        """Take the latest tick that is due, if any; those before it are missed."""
        if now_ns < self.next_ns:
            return False
        latest = (now_ns - self._start_ns) // self._period_ns
        self.missed += latest - self._tick
        self._tick = latest + 1
        return True


def mean_power_w(first: EnergyReading | None, last: EnergyReading | None) -> float | None:
    """Return the mean power between two readings of the energy counter; None without two.

    Joules per step are this power times the seconds per step, and tokens per joule are tokens per
    second divided by it, although the counter is not read at the ends of steps.
    """
    if first is None or last is None or last[0] <= first[0]:
        return None
    (first_s, first_j), (last_s, last_j) = first, last
    return (last_j - first_j) / (last_s - first_s)


class Sampler:
    """Samples one GPU by UUID, or this process's resident set when `uuid` is None.

    Args:
        uuid: from `nvml.resolve_uuid`.
        emit: receives each GpuRecord and EventRecord, mostly on the sampler's thread; must not
            block.
        memory_every_s, rest_every_s: between readings; line_every_s: between GpuRecords.
        clock_ns, wait: time, and a sleep that returns True to end; tests simulate them.
    """

    def __init__(
        self,
        *,
        uuid: str | None,
        emit: Callable[[Record], None],
        memory_every_s: float = 0.1,
        rest_every_s: float = 1.0,  # PCIe's two take 20 ms each
        line_every_s: float = 1.0,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self._emit = emit
        self._periods_ns = [round(s * 1e9) for s in (memory_every_s, rest_every_s, line_every_s)]
        self._clock_ns = clock_ns
        self._stopping = threading.Event()
        self._wait = self._stopping.wait if wait is None else wait
        self._thread = threading.Thread(target=self.run, name="shardscale-sampler", daemon=True)
        self._lock = threading.Lock()  # a thread left behind must not emit after `stop`
        self._closed = False
        self._grids: list[Grid] = []
        self._process = psutil.Process()
        self._gpu: GpuReadings | None = None
        if uuid is not None:
            from launcher.measure.gpu_readings import GpuReadings

            self._gpu = GpuReadings(uuid, self._event)
        self._totals = _Totals()
        self._line: Values = {}  # of the next record

    @classmethod
    def of(cls, device: torch.device, emit: Callable[[Record], None]) -> Self:
        """Sample a device with a record each second; memory is read more often."""
        uuid = None
        if device.type == "cuda":
            from launcher.measure.nvml import resolve_uuid

            uuid = resolve_uuid(device)
        return cls(uuid=uuid, emit=emit)

    @property
    def energy(self) -> EnergyReading | None:
        """Return the newest reading of the energy counter; None until there is one."""
        return None if self._gpu is None else self._gpu.energy

    def start(self) -> None:
        """Start sampling; returns at once, since NVML starts on the sampler's thread."""
        self._thread.start()

    def stop(self) -> SamplerSummary:
        """Stop and summarize, within about a second even if NVML hangs. May be called twice."""
        self._stopping.set()
        if self._thread.is_alive() and not self._closed:
            self._thread.join(STOP_WAIT_S)
            if self._thread.is_alive():
                self._event("sampler_stuck", reading=self._gpu.doing if self._gpu else None)
        with self._lock:
            self._closed = True
            return self._totals.summary(self._gpu, sum(grid.missed for grid in self._grids))

    def run(self) -> None:
        """Sample until stopped or until the GPU is lost: the body of the thread."""
        try:
            self._sample_until_stopped()
            if self._gpu is not None:
                self._gpu.close()
        except Exception as error:
            # A defect in here must not end the training.
            self._event("sampler_failed", error=repr(error))

    def _sample_until_stopped(self) -> None:
        start_ns = self._clock_ns()
        *readings, per_line = (Grid(start_ns, period_ns) for period_ns in self._periods_ns)
        self._grids = memory, rest = readings
        ended = False
        while not ended:
            now_ns = self._clock_ns()
            t_s = (now_ns - start_ns) / 1e9
            with_memory, with_rest = memory.take(now_ns), rest.take(now_ns)
            if with_memory or with_rest:
                self._read(now_ns, t_s, with_memory=with_memory, with_rest=with_rest)
            if per_line.take(now_ns):
                self._emit_line(t_s)
            next_ns = min(grid.next_ns for grid in (memory, rest, per_line))
            ended = self._gpu is not None and self._gpu.lost
            ended = ended or self._wait(max(0, next_ns - self._clock_ns()) / 1e9)
        self._emit_line(t_s)  # the last, incomplete period

    def _read(self, now_ns: int, t_s: float, *, with_memory: bool, with_rest: bool) -> None:
        values = None
        if self._gpu is not None:
            values = self._gpu.read(now_ns, t_s, with_memory=with_memory, with_rest=with_rest)
            if self._gpu.lost:
                return
        source = "psutil" if values is None else "nvml"
        if values is None or with_rest:
            values = {**(values or {}), "host_rss_bytes": self._process.memory_info().rss}
        if not values:
            return
        # NVML came or went, and a record is of one source
        if self._line.get("source", source) != source:
            self._emit_line(t_s)
        with self._lock:
            if not self._closed:
                self._totals.add(source, values)
        most = {
            name: max(values[name], self._line.get(name, 0)) for name in MAXIMA if name in values
        }
        uuid = {"uuid": self._gpu.uuid} if self._gpu is not None and source == "nvml" else {}
        self._line |= {"source": source, **uuid, **values, **most}

    def _emit_line(self, t_s: float) -> None:
        values, self._line = self._line, {}
        with self._lock:
            if values and not self._closed:
                self._emit(GpuRecord(t_s=t_s, **values))

    def _event(self, name: str, **detail: Any) -> None:
        with self._lock:
            if not self._closed:
                self._emit(EventRecord(name=name, unix_s=time.time(), detail=detail))


@dataclass(kw_only=True, slots=True)
class _Totals:
    samples: int = 0
    from_nvml: bool = False
    peaks: dict[str, Any] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, source: str, values: Values) -> None:
        self.samples += 1
        self.from_nvml |= source == "nvml"
        for name, value in values.items():
            self.peaks[name] = max(value, self.peaks.get(name, value))
            self.sums[name] = value + self.sums.get(name, 0.0)
            self.counts[name] += 1

    def summary(self, gpu: GpuReadings | None, missed_ticks: int) -> SamplerSummary:
        means = {name: total / self.counts[name] for name, total in self.sums.items()}
        return SamplerSummary(
            source="nvml" if self.from_nvml else "psutil",
            uuid=gpu.uuid if gpu is not None and self.from_nvml else None,
            samples=self.samples,
            missed_ticks=missed_ticks,
            peak_used_bytes=self.peaks.get("memory_used_bytes"),
            peak_host_rss_bytes=self.peaks.get("host_rss_bytes"),
            mean_gpu_utilization_percent=means.get("gpu_utilization_percent"),
            mean_power_w=means.get("power_w"),
            max_power_w=self.peaks.get("power_w"),
            max_temperature_c=self.peaks.get("temperature_c"),
            # One reading of the counter is a beginning, not an amount.
            energy_j=self.peaks["energy_j"] if self.counts["energy_j"] > 1 else None,
            gpu_lost=gpu is not None and gpu.lost,
            missing={} if gpu is None else gpu.missing(),
            faults={} if gpu is None else gpu.counted_faults(),
        )
