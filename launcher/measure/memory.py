"""What one rank has in memory: headlines, peaks per phase and period, and the ledger at the peak of
chosen steps.

On a GPU from the caching allocator's statistics; on a CPU from `--memory-trace`; without either
the figures are unknown, and stay None.
"""

import contextlib
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from launcher.measure.allocator_history import AllocatorHistory
from launcher.measure.host_memory import host_bytes
from launcher.measure.live_trace import LiveTrace
from launcher.measure.workspaces import take_workspaces
from launcher.parallel.world import World
from launcher.strategies.engine import Engine, StorageCount
from launcher.strategies.ledger import Ledger, LedgerLines

LEDGER_STEPS = (1, 3)  # the first step, and one whose allocations repeat from then on


def read_memory(device: torch.device) -> tuple[int | None, int]:
    """Bytes of (the highest this process has reserved of a GPU, None on a CPU; what the whole
    device, or process, uses now)."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return torch.cuda.max_memory_reserved(device), total - free
    return None, psutil.Process().memory_info().rss


def capacity_bytes(device: torch.device) -> int:
    """All that there is of the memory that `read_memory` reads."""
    on_gpu = device.type == "cuda"
    return torch.cuda.mem_get_info(device)[1] if on_gpu else host_bytes()


def peak_rss_bytes() -> int:
    """Highest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class MemoryMeter:
    """What the session asks of either way of measuring; by itself, the answers of a CPU without
    tracing, where nothing is known phase by phase."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._period = "init"
        self._peaks: dict[tuple[str, str], int] = {}
        self._step_peak_bytes = 0
        self._engine: Engine | None = None
        self._recording = False

    def period(self, name: str) -> None:
        """From now on peaks belong to `name` (init, first_step, steady, evaluation)."""
        self._period = name

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Measure what runs inside."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def checkpointing(self, period: str) -> Iterator[None]:
        """A checkpoint is read or written inside, whose peaks belong to `period` from now on."""
        self.period(period)
        with self.phase("checkpoint"):
            yield

    def watch(self, engine: Engine) -> None:
        """The engine whose states the ledger names."""
        self._engine = engine

    def begin_step(self, step: int) -> None:
        """A step starts."""
        self._step_peak_bytes = 0
        self._recording = step in LEDGER_STEPS

    def end_step(self, step: int) -> Ledger | None:
        """A step is over; the ledger at its peak, for the steps that have one."""
        return None

    def step_peak_bytes(self) -> int | None:
        """Highest bytes in the step that has just ended."""
        return None

    def peaks(self) -> dict[tuple[str, str], int]:
        """(period, phase) -> highest bytes."""
        return self._peaks

    def now(self) -> Ledger | None:
        """The ledger at this moment, for a failure report."""
        return None

    def _note(self, phase: str, peak_bytes: int) -> None:
        """A phase is over; it may be nested in another, and come again."""
        self._step_peak_bytes = max(self._step_peak_bytes, peak_bytes)
        key = (self._period, phase)
        self._peaks[key] = max(peak_bytes, self._peaks.get(key, 0))

    def _count(self) -> StorageCount:
        return StorageCount() if self._engine is None else self._engine.count_states()

    def _ledger_of(self, live_bytes: int) -> Ledger:
        """What is no state is temporary."""
        states = self._count().ledger(self._device)
        rest = live_bytes - states.device.states_bytes
        lines = replace(states.device, temporary_bytes=rest, used_bytes=live_bytes)
        return replace(states, device=lines)


class TracedMemory(MemoryMeter):
    """CPU, by tracing: exact, phase by phase and byte by byte."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.trace = LiveTrace()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.trace.phase = name
        self.trace.reset_peak()
        if name == "step" and self._recording:
            self.trace.claim(self._count().owners)  # gradients are whole now
        try:
            yield
        finally:
            self._note(name, self.trace.peak_bytes())
            if name == "forward" and self._recording:
                self.trace.mark_activations(self._count().owners)

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        if self._recording:
            self.trace.record()

    def step_peak_bytes(self) -> int | None:
        return self._step_peak_bytes

    def end_step(self, step: int) -> Ledger | None:
        if not self._recording:
            return None
        self._recording = False
        self.trace.claim(self._count().owners)  # optimizer states may be new
        content = self.trace.stop()
        by_category = {"activations": 0, "temporary": 0, **content.by_category}
        lines = LedgerLines(
            **{f"{name}_bytes": size for name, size in by_category.items()},
            used_bytes=content.total_bytes,
            unexplained_bytes=0,
        )
        nothing = LedgerLines()
        return Ledger(
            moment="peak", step=step, phase=content.phase, device=lines, host=nothing, disk=nothing
        )

    def now(self) -> Ledger | None:
        return self._ledger_of(self.trace.current_bytes)


class CudaMemory(MemoryMeter):
    """GPU, from the caching allocator: peaks from its statistics, ledgers from its history."""

    def __init__(self, device: torch.device, *, history_is_recorded: bool) -> None:
        super().__init__(device)
        self._context_bytes: int | None = None
        self._sampled = True
        self._history = AllocatorHistory(device, is_recorded=history_is_recorded)

    def period(self, name: str) -> None:
        if self._period == "init" and name != "init":
            self._note("build", torch.cuda.max_memory_allocated(self._device))
            take_workspaces(self._device)
            free, total = torch.cuda.mem_get_info(self._device)
            self._context_bytes = total - free - torch.cuda.memory_reserved(self._device)
        super().period(name)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if not self._sampled:
            yield
            return
        torch.cuda.reset_peak_memory_stats(self._device)
        if self._recording:
            # Gradients are whole when the step begins, or added to by the next micro-batch. Weights
            # that are gathered at this moment are no states.
            held = self._count().addresses
            if name != "step":
                held = {address: owner for address, owner in held.items() if owner == "grads"}
            self._history.enter(name, held)
        try:
            yield
        finally:
            self._note(name, torch.cuda.max_memory_allocated(self._device))
            if name == "forward" and self._recording:
                self._history.end_forward(self._count().addresses)

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        # Other backends keep no history.
        self._recording &= torch.cuda.get_allocator_backend() == "native"
        # Reading the allocator's statistics takes tens of microseconds: often enough is enough.
        self._sampled = step <= 10 or step % 10 == 0
        torch.cuda.reset_peak_memory_stats(self._device)
        if self._recording:
            self._history.record(self._count().addresses)

    def step_peak_bytes(self) -> int | None:
        return max(self._step_peak_bytes, torch.cuda.max_memory_allocated(self._device))

    def end_step(self, step: int) -> Ledger | None:
        if not self._recording:
            return None
        self._recording = False
        states = self._count()
        content = self._history.stop(states.addresses)
        by_category = {"activations": 0, **content.by_category}
        # Blocks that were not worth splitting are larger than what was asked for.
        by_category["temporary"] += self._step_peak_bytes - content.total_bytes
        free, total = torch.cuda.mem_get_info(self._device)
        reserved, context = torch.cuda.memory_reserved(self._device), self._context_bytes
        lines = LedgerLines(
            **{f"{name}_bytes": size for name, size in by_category.items()},
            allocator_slack_bytes=reserved - self._step_peak_bytes,
            context_bytes=context,
            used_bytes=total - free,
            unexplained_bytes=None if context is None else total - free - reserved - context,
        )
        ledger = states.ledger(self._device, moment="peak")
        return replace(ledger, step=step, phase=content.phase, device=lines)

    def now(self) -> Ledger | None:
        return self._ledger_of(torch.cuda.memory_allocated(self._device))


def dump_snapshot(folder: Path, world: World) -> str | None:
    """Keep the GPU allocator's state for torch's memory viewer (pytorch.org/memory_viz)."""
    if world.device.type != "cuda":
        return None
    path = folder / f"memory_snapshot_rank{world.rank}.pickle"
    torch.cuda.memory._dump_snapshot(str(path))
    return str(path)


def memory_meter(device: torch.device, *, trace: bool, history: bool = False) -> MemoryMeter:
    """Return the meter for a device.

    Args:
        trace: on a CPU, count every live tensor.
        history: the allocator of the GPU already records its history.
    """
    if device.type == "cuda":
        return CudaMemory(device, history_is_recorded=history)
    return TracedMemory(device) if trace else MemoryMeter(device)
