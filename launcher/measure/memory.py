"""Memory of one rank: totals, peaks per phase and period, and the ledger at the peak of a step.

On a GPU they come from the caching allocator, on a CPU from `--memory-trace`; without either they
are unknown, and None.
"""

import contextlib
import re
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from launcher.measure.host_memory import host_bytes
from launcher.parallel.world import World
from launcher.strategies.engine import Engine, StorageCount
from launcher.strategies.ledger import Ledger, LedgerLines

LEDGER_STEPS = (1, 3)  # the first step, and one whose allocations repeat from then on


def read_memory(device: torch.device) -> tuple[int | None, int]:
    """Return bytes of (the most this process has reserved of a GPU, None on a CPU; current use of
    the whole device, or on a CPU of this process)."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return torch.cuda.max_memory_reserved(device), total - free
    return None, psutil.Process().memory_info().rss


def capacity_bytes(device: torch.device) -> int:
    """Return the capacity of the memory that `read_memory` reads."""
    on_gpu = device.type == "cuda"
    return torch.cuda.mem_get_info(device)[1] if on_gpu else host_bytes()


def peak_rss_bytes() -> int:
    """Return the highest resident set of this process so far."""
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        if found := re.search(r"VmHWM:\s+(\d+) kB", status):
            return int(found[1]) * 1024
    # Only then: it starts at the peak of the program that has started this one.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


class MemoryMeter:
    """Base of the memory meters. By itself it meters a CPU without tracing, where the figures of
    phases are unknown."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._period = "init"
        self.peaks: dict[tuple[str, str], int] = {}
        """(period, phase) -> peak bytes."""
        self._step_peak_bytes = 0
        self._engine: Engine | None = None
        self._recording = False

    def period(self, name: str) -> None:
        """Assign peaks from now on to `name` (init, first_step, steady, evaluation)."""
        self._period = name

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Measure the block as a phase."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def apart(self, period: str, phase: str) -> Iterator[None]:
        """Measure an evaluation or a checkpoint inside, which are no part of a step."""
        self.period(period)
        with self.phase(phase):
            yield

    def watch(self, engine: Engine) -> None:
        """Set the engine whose states the ledger shows."""
        self._engine = engine

    def begin_step(self, step: int) -> None:
        """Begin a step."""
        self._step_peak_bytes = 0
        self._recording = step in LEDGER_STEPS

    def end_step(self, step: int) -> Ledger | None:
        """End a step; return the ledger at its peak, for the steps that record one."""
        return None

    def step_peak_bytes(self) -> int | None:
        """Return the peak of the step that has just ended."""
        return None

    def peak_bytes(self) -> int | None:
        """Return the highest of the whole run."""
        return max(self.peaks.values(), default=None)

    def now(self) -> Ledger | None:
        """Return the ledger at this moment, for a failure report."""
        return None

    def _note(self, phase: str, peak_bytes: int) -> None:
        # Phases may be nested, and occur several times.
        self._step_peak_bytes = max(self._step_peak_bytes, peak_bytes)
        key = (self._period, phase)
        self.peaks[key] = max(peak_bytes, self.peaks.get(key, 0))

    def _count(self) -> StorageCount:
        return StorageCount() if self._engine is None else self._engine.count_states()

    def _ledger_of(self, live_bytes: int) -> Ledger:
        states = self._count().ledger(self._device)
        rest = live_bytes - states.device.states_bytes
        lines = replace(states.device, temporary_bytes=rest, used_bytes=live_bytes)
        return replace(states, device=lines)


class TracedMemory(MemoryMeter):
    """CPU meter that traces every tensor: exact per phase and byte."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        from launcher.measure.live_trace import LiveTrace

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
    """GPU meter: peaks from the caching allocator's statistics, ledgers from its history."""

    def __init__(self, device: torch.device, *, history_is_recorded: bool) -> None:
        super().__init__(device)
        from launcher.measure.allocator_history import AllocatorHistory

        self._context_bytes: int | None = None
        self._sampled = True
        self._highest_step_bytes = 0
        self._history = AllocatorHistory(device, is_recorded=history_is_recorded)

    def period(self, name: str) -> None:
        if self._period == "init" and name != "init":
            self._note("build", torch.cuda.max_memory_allocated(self._device))
            _allocate_workspaces(self._device)
            free, total = torch.cuda.mem_get_info(self._device)
            # what is not torch's: the context with its kernels, NCCL, other processes
            self._context_bytes = total - free - torch.cuda.memory_reserved(self._device)
        super().period(name)
        self._sampled = True  # outside of steps; `begin_step` decides for each of them

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if not self._sampled:
            yield
            return
        torch.cuda.reset_peak_memory_stats(self._device)
        if self._recording:
            # Gradients are complete when the step begins, or the next micro-batch adds to them.
            # Weights that are gathered at this moment are no states.
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
        # Reading the allocator's statistics takes tens of microseconds, so later steps are sampled.
        self._sampled = step <= 10 or step % 10 == 0
        torch.cuda.reset_peak_memory_stats(self._device)
        if self._recording:
            self._history.record(self._count().addresses)

    def step_peak_bytes(self) -> int:
        # Sampled phases have reset the statistics; in other steps these are the whole step's.
        return max(self._step_peak_bytes, torch.cuda.max_memory_allocated(self._device))

    def peak_bytes(self) -> int:
        # phases of most steps are not sampled, and routed experts make steps differ
        return max([self._highest_step_bytes, *self.peaks.values()])

    def end_step(self, step: int) -> Ledger | None:
        self._highest_step_bytes = max(self._highest_step_bytes, self.step_peak_bytes())
        if not self._recording:
            return None
        self._recording = False
        states = self._count()
        content = self._history.stop(states.addresses)
        by_category = {"activations": 0, **content.by_category}
        # Blocks that the allocator does not split are larger than requested.
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
    """Save the GPU allocator's state for torch's memory viewer (pytorch.org/memory_viz)."""
    if world.device.type != "cuda":
        return None
    path = folder / f"memory_snapshot_rank{world.rank}.pickle"
    torch.cuda.memory._dump_snapshot(str(path))
    return str(path)


def memory_meter(device: torch.device, *, trace: bool) -> MemoryMeter:
    """Return the meter for a device.

    Args:
        trace: on a CPU, count every live tensor. On a GPU the run records the allocator's history.
    """
    if device.type == "cuda":
        return CudaMemory(device, history_is_recorded=trace)
    return TracedMemory(device) if trace else MemoryMeter(device)


def _allocate_workspaces(device: torch.device) -> None:
    # cuBLAS's workspaces of the main thread and autograd's: in the first step they would look like
    # activations and gradients.
    matrix = torch.ones(8, 8, device=device, requires_grad=True)
    (matrix @ matrix).sum().backward()
