"""Journal: records of a run, on disk, on the console and in loggers.

Figures of steps stay on the device until a logged step, so that training does not wait for them;
then one small all-reduce makes the losses global, and all pending steps are written.
"""

import collections
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.measure import loggers
from launcher.measure.loggers import Loggers
from launcher.measure.memory import capacity_bytes, read_memory
from launcher.measure.phases import PhaseClock, PhaseTimes, StepTimes
from launcher.measure.records import (
    EvalRecord,
    EventRecord,
    GpuRecord,
    SampleRecord,
    StepRecord,
)
from launcher.model.foreign.routing import load_of
from launcher.parallel.world import World
from launcher.run.agreement import REQUESTS, Agreement
from launcher.run.console import RunConsole, percent
from launcher.run.record_file import RecordFile
from launcher.run.steps import EXPERT_FIELDS, EndedStep, SkippedSteps, read_together, straggler
from launcher.run.training_record import TrainingRecord
from launcher.util.errors import one_line
from launcher.util.json_file import Record
from launcher.util.sizes import GIB, duration, gib


class Journal:
    """One rank's `rank<N>.jsonl`; on the main rank also console and loggers.

    Args:
        reopens: continue in the file of the run's earlier start.
    """

    def __init__(
        self,
        folder: Path,
        run: TrainingRecord,
        world: World,
        clock: PhaseClock,
        console: RunConsole,
        *,
        agreement: Agreement,
        skipped: SkippedSteps,
        loggers: Loggers,
        stops_after: int | None = None,
        reopens: bool = False,
    ) -> None:
        self._run = run
        self._world = world
        self._clock = clock
        self.console = console
        self._last_step = min(run.steps, stops_after or run.steps)
        self._started_s = time.monotonic()
        self.agreement = agreement
        self.skipped = skipped
        self._pending: list[EndedStep] = []
        self.file = RecordFile(folder / f"rank{run.rank}.jsonl", reopens=reopens)
        self._loggers = loggers
        self._capacity_bytes = capacity_bytes(world.device)
        self._peak_flops: float | None = None
        if run.device_name is not None:
            from launcher.measure.hardware import peak_flops_per_s

            self._peak_flops = peak_flops_per_s(run.device_name)
        # Appended to by the sampler's thread (deque.append is atomic), written by this one.
        self._samples: collections.deque[Record] = collections.deque()
        self._sample: GpuRecord | None = None
        self.times = StepTimes()
        self.write(run)

    def step(self, ended: EndedStep) -> None:
        """Record an ended step; write and show at logged steps."""
        self._clock.end_step()
        self._pending.append(ended)
        step = ended.step
        # also the first step of a start, whose times are a period of their own
        if not self.times.count or step % self.agreement.log_every == 0 or step == self._run.steps:
            self.flush()
        else:
            self._write_samples()  # with a large --log-every they would pile up in memory
            self.agreement.between_logged_steps(step)
        self.console.progress("training", step, self._last_step)

    def flush(self) -> None:
        """Make pending steps global, write them, and show the last one."""
        if not self._pending:
            return
        times = self._clock.take()
        reserved_peak_bytes, used_bytes = read_memory(self._world.device)
        # What a rank does alone: the rest of a step is spent waiting for the others.
        alone_s = sum(t["data_s"] + t["forward_s"] for t in times) / len(times)
        ended, alone_by_rank_s, most_used_bytes = self._over_all_ranks(alone_s, used_bytes)
        for pending, figures, spent in zip(self._pending, ended, times, strict=True):
            self.write(
                StepRecord(
                    step=pending.step,
                    lr=pending.lr,
                    tokens=self._tokens_per_step,
                    allocated_peak_bytes=pending.peak_bytes,
                    reserved_peak_bytes=reserved_peak_bytes,
                    device_used_bytes=used_bytes,
                    **(figures | spent),
                )
            )
        for spent in times:
            self.times.add(spent)
        self._write_samples()
        slow = straggler(alone_by_rank_s) if self.times.steady else None
        if slow is not None:
            slower = f"{slow[1]:.2f} x the median of data + forward"
            self.event("straggler", self._pending[-1].step, rank=slow[0], slower=slower)
        if self._world.is_main:
            slow_rank = None if slow is None else slow[0]
            self._show(ended, times, reserved_peak_bytes, most_used_bytes, slow_rank)
        steps = [pending.step for pending in self._pending]
        self._pending = []
        self.file.flush()
        # after all records are written: it may end the run
        for step, figures in zip(steps, ended, strict=True):
            self.skipped.note(step, applied=figures["applied"], loss=figures["loss"])

    def secure(self) -> None:
        """Sync all records to disk before a checkpoint marks their steps as done; all ranks call
        this after the same step."""
        self.flush()
        self._write_samples()
        self.file.flush(durably=True)

    def evaluated(self, record: EvalRecord) -> None:
        """Write and show an evaluation."""
        self.write(record)
        self.console.figures(
            {
                "step": str(record.step),
                f"{record.split} loss": f"{record.loss:.4f}",
                "perplexity": f"{record.perplexity:.2f}",
                "tokens": f"{record.tokens:,}",
            }
        )
        values = {"loss": record.loss, "perplexity": record.perplexity}
        self._plot({f"{name}/{record.split}": value for name, value in values.items()}, record.step)

    def sampled(self, record: SampleRecord, *, shown: bool) -> None:
        """Write a generated text, and show it on the console."""
        self.write(record)
        text = record.prompt + record.text
        if shown:
            self.console.line(f"sample: {one_line(text, most=1000)}")
        self._loggers.text(record.step, "sample", text)
        self._report_logger_failures()

    def event(self, name: str, step: int | None = None, **detail: Any) -> None:
        """Write an event."""
        self.write(EventRecord(name=name, step=step, unix_s=time.time(), detail=detail))
        self.file.flush()

    def write(self, record: Record) -> None:
        """Write any record."""
        self.file.add(record)

    def from_sampler(self, record: Record) -> None:
        """Queue a record of another thread; it is written with the next flush."""
        self._samples.append(record)

    def close(self) -> None:
        """Flush and close files and loggers."""
        self._loggers.close()
        self._report_logger_failures()
        self._write_samples()
        self.file.close()

    def tokens_per_s(self) -> float | None:
        """Return the mean global rate after the warm-up steps; None without any."""
        if not self.times.steady:
            return None
        return self._tokens_per_step * self.times.steady / self.times.steady_s["duration_s"]

    @property
    def _tokens_per_step(self) -> int:
        return self._run.global_batch * self._run.seq_len

    def _over_all_ranks(
        self, alone_s: float, used_bytes: int
    ) -> tuple[list[dict[str, Any]], list[float], int]:
        """Return each pending step's global fields, each rank's time, and the most memory of any,
        in one all-reduce and one copy from the device.

        The same all-reduce carries the agreement on stops and saves.
        """
        # The vector: of each pending step its loss, then its tokens per expert; this rank's
        # requests; and for each rank its time alone and memory in GiB, of which it fills its own.
        size, rank, pending = self._world.size, self._world.rank, self._pending
        step = pending[-1].step
        of_rank = [0.0] * (2 * size)
        of_rank[rank], of_rank[size + rank] = alone_s, used_bytes / GIB
        mine = [*self.agreement.requests(step), *of_rank]
        routed = [p.routed for p in pending if p.routed is not None]
        sizes = [len(pending), *(tokens.numel() for tokens in routed)]
        sums = torch.stack([p.loss.float() for p in pending])
        sums = torch.cat([sums, *(tokens.flatten() for tokens in routed)])
        if size > 1:
            # Not page-locked: the driver has copied it when this returns, and the GPU runs on.
            sent = torch.tensor(mine, dtype=sums.dtype).to(sums.device, non_blocking=True)
            sums = torch.cat([sums, sent])
            dist.all_reduce(sums)
        losses_there, *counts, rest_there = sums.split([*sizes, len(sums) - sum(sizes)])
        loads = [load_of(n.view_as(own)) for n, own in zip(counts, routed, strict=True)]
        values, norms, applied, shares = read_together(
            [*losses_there.unbind(), *rest_there.unbind()],
            [p.grad_norm for p in pending],
            [p.applied for p in pending],
            [share for load in loads for share in load.unbind()],
        )
        # A rank alone has sent nothing, and its own figures are the sums.
        losses, rest = values[: len(pending)], values[len(pending) :] or mine
        self.agreement.settle(step, rest[:REQUESTS])
        by_rank = rest[REQUESTS:]
        # three figures of `load_of` per step
        each = [shares[n : n + 3] for n in range(0, len(shares), 3)] or [[] for _ in pending]
        figures = [
            {"loss": loss / size, "grad_norm": norm, "applied": took != 0}
            | dict(zip(EXPERT_FIELDS, load, strict=False))
            for loss, norm, took, load in zip(losses, norms, applied, each, strict=True)
        ]
        return figures, by_rank[:size], int(max(by_rank[size:]) * GIB)

    def _show(
        self,
        ended: Sequence[Mapping[str, Any]],
        times: list[PhaseTimes],
        reserved_peak_bytes: int | None,
        used_bytes: int,
        slow_rank: int | None,
    ) -> None:
        last, figures = self._pending[-1], ended[-1]
        step_s = sum(t["duration_s"] for t in times) / len(times)
        tokens_per_s = self._tokens_per_step / step_s
        line = {
            "step": f"{last.step} of {self._run.steps}",
            "loss": f"{figures['loss']:.4f}",
            "grad_norm": f"{figures['grad_norm']:.2f}",
            "lr": f"{last.lr:.1e}",
            "memory": f"{gib(used_bytes)}({percent(used_bytes, self._capacity_bytes)})",
            "tps": f"{tokens_per_s:,.0f}",
        }
        flops_per_s = tokens_per_s * self._run.flops_per_token / self._run.world_size
        if self._world.device.type == "cuda":  # the peak of a CPU is unknown
            line["tflops"] = f"{flops_per_s / 1e12:.2f}"
            line["mfu"] = percent(flops_per_s, self._peak_flops)
        if slow_rank is not None:
            line["slow"] = f"rank {slow_rank}"
        line["elapsed"] = duration(time.monotonic() - self._started_s)
        if self.times.steady and last.step < self._last_step:
            line["left"] = duration(step_s * (self._last_step - last.step))
        self.console.figures(line)
        scalars = {"loss/train": figures["loss"], "grad_norm": figures["grad_norm"], "lr": last.lr}
        scalars |= {f"experts/{n}": figures[n] for n in EXPERT_FIELDS if n in figures}
        skipped = self.skipped.total + sum(not step["applied"] for step in ended)
        scalars |= {"tokens_per_s": tokens_per_s, "skipped_steps": skipped}
        scalars |= loggers.time_scalars(times) | loggers.flops_scalars(
            flops_per_s, self._peak_flops
        )
        peaks = [p.peak_bytes for p in self._pending]
        scalars |= loggers.memory_scalars(peaks, reserved_peak_bytes, used_bytes)
        scalars |= loggers.gpu_scalars(self._sample)
        self._plot(scalars, last.step)

    def _plot(self, scalars: Mapping[str, float], step: int) -> None:
        self._loggers.scalars(step, scalars)
        self._report_logger_failures()

    def _report_logger_failures(self) -> None:
        for logger, error in self._loggers.failures().items():
            self.event("logger_failed", logger=logger, error=error)
            self.console.line(f"{logger} gets no more figures, training goes on: {error}")

    def _write_samples(self) -> None:
        while self._samples:
            record = self._samples.popleft()
            self.write(record)
            if isinstance(record, GpuRecord):
                self._sample = record
