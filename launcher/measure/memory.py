"""Peaks per phase and period, and the ledger at the peak of chosen steps.

On a GPU from the caching allocator's statistics; on a CPU from `--memory-trace`; without either
the figures are unknown, and stay None.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from launcher.memory.ledger import Ledger, LedgerLines
from launcher.memory.live_trace import LiveTrace
from launcher.memory.storages import StorageCount
from launcher.parallel.world import World
from launcher.strategies.engine import Engine

LEDGER_STEPS = (1, 3)  # the first step, and one whose allocations repeat from then on


class MemoryMeter(Protocol):
    """What the session asks of either way of measuring."""

    def period(self, name: str) -> None:
        """From now on peaks belong to `name` (init, first_step, steady, evaluation)."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Measure what runs inside."""

    def watch(self, engine: Engine) -> None:
        """The engine whose states the ledger names."""

    def begin_step(self, step: int) -> None:
        """A step starts."""

    def end_step(self, step: int) -> Ledger | None:
        """A step is over; the ledger at its peak, for the steps that have one."""

    def step_peak_bytes(self) -> int | None:
        """Highest bytes in the step that has just ended."""

    def peaks(self) -> dict[tuple[str, str], int]:
        """(period, phase) -> highest bytes."""

    def now(self) -> Ledger | None:
        """The ledger at this moment, for a failure report."""


class _Peaks:
    """Highest bytes per period and phase, over nested or repeated phases."""

    def __init__(self) -> None:
        self.period = "init"
        self.step = 0
        self.values: dict[tuple[str, str], int] = {}

    def note(self, phase: str, value: int) -> None:
        self.step = max(self.step, value)
        key = (self.period, phase)
        self.values[key] = max(value, self.values.get(key, 0))


class TracedMemory:
    """CPU, by tracing: exact, phase by phase and byte by byte."""

    def __init__(self, device: torch.device) -> None:
        self.trace = LiveTrace()
        self._device = device
        self._peaks = _Peaks()
        self._engine: Engine | None = None
        self._recording = False

    def period(self, name: str) -> None:
        self._peaks.period = name

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.trace.phase = name
        self.trace.reset_peak()
        if name == "step" and self._recording:
            self.trace.claim(self._count().owners)  # gradients are whole now
        try:
            yield
        finally:
            self._peaks.note(name, self.trace.peak_bytes())
            if name == "forward" and self._recording:
                self.trace.mark_activations(self._count().owners)

    def watch(self, engine: Engine) -> None:
        self._engine = engine

    def begin_step(self, step: int) -> None:
        self._peaks.step = 0
        self._recording = step in LEDGER_STEPS
        if self._recording:
            self.trace.record()

    def step_peak_bytes(self) -> int | None:
        return self._peaks.step

    def end_step(self, step: int) -> Ledger | None:
        if not self._recording:
            return None
        self._recording = False
        self.trace.claim(self._count().owners)  # optimizer states may be new
        content = self.trace.stop()
        lines = {f"{name}_bytes": size for name, size in content.by_category.items()}
        activations = lines.pop("activations_bytes", 0)
        temporary = lines.pop("temporary_bytes", 0)
        return Ledger(
            moment="peak",
            step=step,
            phase=content.phase,
            device=LedgerLines(
                **lines,
                activations_bytes=activations,
                temporary_bytes=temporary,
                used_bytes=content.total_bytes,
                unexplained_bytes=0,
            ),
            host=LedgerLines(),
            disk=LedgerLines(),
        )

    def peaks(self) -> dict[tuple[str, str], int]:
        return self._peaks.values

    def now(self) -> Ledger | None:
        states = self._count().ledger(self._device)
        rest = self.trace.current_bytes - states.device.states_bytes
        lines = replace(states.device, temporary_bytes=rest, used_bytes=self.trace.current_bytes)
        return replace(states, device=lines)

    def _count(self) -> StorageCount:
        return StorageCount() if self._engine is None else self._engine.count_states()


class CudaMemory:
    """GPU, from the caching allocator.

    The ledger names states by walking storages, and activations by what the last forward left
    behind. What the peak has on top is gradients being born, up to what they come to when the
    backward is over; the rest is temporary (workspaces, gathered parameters, buckets).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peaks = _Peaks()
        self._engine: Engine | None = None
        self._context_bytes: int | None = None
        self._recording = False
        self._sampled = True
        self._before_forward = 0
        self._left_by_forward = 0
        self._in_forward = StorageCount()
        self._before_step = StorageCount()

    def period(self, name: str) -> None:
        if self._peaks.period == "init" and name != "init":
            self._peaks.note("build", torch.cuda.max_memory_allocated(self._device))
            free, total = torch.cuda.mem_get_info(self._device)
            self._context_bytes = total - free - torch.cuda.memory_reserved(self._device)
        self._peaks.period = name

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if not self._sampled:
            yield
            return
        torch.cuda.reset_peak_memory_stats(self._device)
        if name == "forward" and self._recording:
            self._before_forward = torch.cuda.memory_allocated(self._device)
        if name == "step" and self._recording:
            self._before_step = self._count()
        try:
            yield
        finally:
            peak = torch.cuda.max_memory_allocated(self._device)
            self._peaks.note(name, peak)
            if name == "forward" and self._recording:
                allocated = torch.cuda.memory_allocated(self._device)
                self._left_by_forward = allocated - self._before_forward
                self._in_forward = self._count()

    def watch(self, engine: Engine) -> None:
        self._engine = engine

    def begin_step(self, step: int) -> None:
        # Reading the allocator's statistics takes tens of microseconds: often enough is enough.
        self._sampled = step <= 10 or step % 10 == 0
        self._recording = step in LEDGER_STEPS
        self._peaks.step = 0
        torch.cuda.reset_peak_memory_stats(self._device)

    def step_peak_bytes(self) -> int | None:
        return max(self._peaks.step, torch.cuda.max_memory_allocated(self._device))

    def end_step(self, step: int) -> Ledger | None:
        if not self._recording:
            return None
        held = self._count().owners
        with_gathered = self._in_forward.ledger(self._device).device.params_bytes
        params = self._in_forward.only(held).ledger(self._device).device.params_bytes
        activations = max(0, self._left_by_forward - (with_gathered - params))
        states = self._before_step.ledger(self._device, moment="peak")
        return replace(states, step=step, device=self._lines(states.device, activations))

    def peaks(self) -> dict[tuple[str, str], int]:
        return self._peaks.values

    def now(self) -> Ledger | None:
        states = self._count().ledger(self._device)
        allocated = torch.cuda.memory_allocated(self._device)
        rest = allocated - states.device.states_bytes
        return replace(
            states, device=replace(states.device, temporary_bytes=rest, used_bytes=allocated)
        )

    def _lines(self, states: LedgerLines, activations: int) -> LedgerLines:
        on_top = self._peaks.step - states.states_bytes + states.grads_bytes - activations
        grads = min(states.grads_bytes, max(0, on_top))
        free, total = torch.cuda.mem_get_info(self._device)
        used = total - free
        reserved = torch.cuda.memory_reserved(self._device)
        context = self._context_bytes
        return replace(
            states,
            grads_bytes=grads,
            activations_bytes=activations,
            temporary_bytes=on_top - grads,
            allocator_slack_bytes=reserved - self._peaks.step,
            context_bytes=context,
            used_bytes=used,
            unexplained_bytes=None if context is None else used - reserved - context,
        )

    def _count(self) -> StorageCount:
        return StorageCount() if self._engine is None else self._engine.count_states()


class UnknownMemory:
    """CPU without tracing: nothing is known phase by phase."""

    def period(self, name: str) -> None:
        pass

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def watch(self, engine: Engine) -> None:
        self._engine = engine

    def begin_step(self, step: int) -> None:
        pass

    def end_step(self, step: int) -> Ledger | None:
        return None

    def step_peak_bytes(self) -> int | None:
        return None

    def peaks(self) -> dict[tuple[str, str], int]:
        return {}

    def now(self) -> Ledger | None:
        return None


def dump_snapshot(folder: Path, world: World) -> str | None:
    """Keep the GPU allocator's state for torch's memory viewer (pytorch.org/memory_viz)."""
    if world.device.type != "cuda":
        return None
    path = folder / f"memory_snapshot_rank{world.rank}.pickle"
    torch.cuda.memory._dump_snapshot(str(path))
    return str(path)


def memory_meter(device: torch.device, *, trace: bool) -> MemoryMeter:
    """The meter for a device; `trace` asks for the exact one on a CPU."""
    if device.type == "cuda":
        return CudaMemory(device)
    return TracedMemory(device) if trace else UnknownMemory()
