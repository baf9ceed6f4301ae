"""Writes the records of a run and shows its progress.

Steps are kept on the device until a logged step, so training never waits for a number nobody has
asked for; then one small all-reduce makes the losses global and everything is written.
"""

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.measure.console import RunConsole, gib, percent, step_line
from launcher.measure.device_memory import MemoryReading, read_memory
from launcher.measure.flops import peak_flops_per_s
from launcher.measure.phases import PhaseClock, PhaseTimes
from launcher.measure.records import EvalRecord, EventRecord, Record, RunRecord, StepRecord
from launcher.world import World

WARMUP_STEPS = 2  # compile, allocator and communication start-up: reported, not averaged


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pending:
    step: int
    loss: Tensor
    grad_norm: Tensor | float
    applied: bool
    lr: float


class Journal:
    """One rank's `rank<N>.jsonl`; on the main rank also console and TensorBoard."""

    def __init__(
        self,
        folder: Path,
        run: RunRecord,
        world: World,
        clock: PhaseClock,
        console: RunConsole,
        *,
        log_every: int,
        max_seconds: float | None,
        tensorboard: bool,
    ) -> None:
        self._run = run
        self._world = world
        self._clock = clock
        self._console = console
        self._log_every = log_every
        self._deadline = None if max_seconds is None else time.monotonic() + max_seconds
        self._pending: list[_Pending] = []
        self._file: IO[str] = open(folder / f"rank{run.rank}.jsonl", "x", encoding="utf-8")
        self._board = _open_board(folder / "tb") if tensorboard and world.is_main else None
        self._peak_flops = peak_flops_per_s(run.device_name)
        self.step_durations_s: list[float] = []
        self.first_step_s: float | None = None
        self.out_of_time = False
        self._write(run)

    def step(
        self, step: int, *, loss: Tensor, grad_norm: Tensor | float, applied: bool, lr: float
    ) -> None:
        """Note an ended step; write and show at logged steps.

        `loss` is this rank's mean over its micro-batches.
        """
        self._clock.end_step()
        self._pending.append(
            _Pending(step=step, loss=loss, grad_norm=grad_norm, applied=applied, lr=lr)
        )
        if step == 1 or step % self._log_every == 0 or step == self._run.steps:
            self.flush()
        self._console.progress("training", step, self._run.steps)

    def flush(self) -> None:
        """Make pending steps global, write them, and show the last one."""
        if not self._pending:
            return
        times = self._clock.take()
        losses = self._global_losses()
        memory = read_memory(self._world.device)
        for pending, loss, spent in zip(self._pending, losses, times, strict=True):
            self.step_durations_s.append(spent.duration_s)
            self._write(self._step_record(pending, loss, spent, memory))
        if self.first_step_s is None:
            self.first_step_s = times[0].duration_s
        self._show(self._pending[-1], losses[-1], times, memory)
        self._pending.clear()
        self._file.flush()

    def evaluated(self, record: EvalRecord) -> None:
        """Write and show an evaluation."""
        self._write(record)
        self._console.line(
            step_line(
                {
                    "step": str(record.step),
                    f"{record.split} loss": f"{record.loss:.4f}",
                    "perplexity": f"{record.perplexity:.2f}",
                    "tokens": f"{record.tokens:,}",
                }
            )
        )
        if self._board is not None:
            self._board.add_scalar(f"loss/{record.split}", record.loss, record.step)

    def event(self, name: str, step: int | None = None, **detail: Any) -> None:
        """Write something that happened once."""
        self._write(EventRecord(name=name, step=step, unix_s=time.time(), detail=detail))
        self._file.flush()

    def write(self, record: Record) -> None:
        """Write any other record."""
        self._write(record)

    def close(self) -> None:
        """Flush files; the journal takes nothing more."""
        self._file.close()
        if self._board is not None:
            self._board.close()

    def tokens_per_s(self) -> float | None:
        """Mean global rate after the warm-up steps, None when there are no others."""
        steady = self.step_durations_s[WARMUP_STEPS:]
        if not steady:
            return None
        return self._tokens_per_step * len(steady) / sum(steady)

    @property
    def _tokens_per_step(self) -> int:
        return self._run.global_batch * self._run.seq_len

    def _global_losses(self) -> list[float]:
        """Mean over ranks of the pending losses; the same trip settles whether time is up."""
        over = self._deadline is not None and time.monotonic() > self._deadline
        values = torch.stack([p.loss.float() for p in self._pending])
        message = torch.cat([values, values.new_tensor([float(over and self._world.is_main)])])
        if self._world.size > 1:
            dist.all_reduce(message)
        self.out_of_time = bool(message[-1] > 0)
        return [loss / self._world.size for loss in message[:-1].tolist()]

    def _step_record(
        self, pending: _Pending, loss: float, spent: PhaseTimes, memory: MemoryReading
    ) -> StepRecord:
        norm = float(pending.grad_norm)
        return StepRecord(
            step=pending.step,
            loss=loss,
            grad_norm=norm if math.isfinite(norm) else None,
            lr=pending.lr,
            tokens=self._tokens_per_step,
            duration_s=spent.duration_s,
            applied=pending.applied,
            data_s=spent.data_s,
            forward_s=spent.forward_s,
            backward_s=spent.backward_s,
            step_s=spent.step_s,
            allocated_peak_bytes=memory.allocated_peak_bytes,
            reserved_peak_bytes=memory.reserved_peak_bytes,
            device_used_bytes=memory.used_bytes,
        )

    def _show(
        self, last: _Pending, loss: float, times: list[PhaseTimes], memory: MemoryReading
    ) -> None:
        if not self._world.is_main:
            return
        step_s = sum(t.duration_s for t in times) / len(times)
        tokens_per_s = self._tokens_per_step / step_s
        flops_per_s = tokens_per_s * self._run.flops_per_token / self._run.world_size
        norm = float(last.grad_norm)
        used = memory.used_bytes
        self._console.line(
            step_line(
                {
                    "step": str(last.step),
                    "loss": f"{loss:.4f}",
                    "grad_norm": f"{norm:.2f}",
                    "lr": f"{last.lr:.1e}",
                    "memory": f"{gib(used)}({percent(used, memory.capacity_bytes)})",
                    "tps": f"{tokens_per_s:,.0f}",
                    "tflops": f"{flops_per_s / 1e12:.2f}",
                    "mfu": percent(flops_per_s, self._peak_flops),
                }
            )
        )
        if self._board is not None:
            scalars = {"loss/train": loss, "grad_norm": norm, "lr": last.lr}
            scalars |= {"tokens_per_s": tokens_per_s, "step_s": step_s}
            for name, value in scalars.items():
                self._board.add_scalar(name, value, last.step)

    def _write(self, record: Record) -> None:
        self._file.write(json.dumps(record.as_dict()) + "\n")


def _open_board(folder: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))
