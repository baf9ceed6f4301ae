"""Everything around the loop that writes: folder, journal, console, and the closing summary."""

import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from launcher.errors import ExitCode
from launcher.measure.console import RunConsole, gib
from launcher.measure.device_memory import peak_bytes
from launcher.measure.folder import RunFolder
from launcher.measure.journal import Journal
from launcher.measure.phases import PhaseClock
from launcher.measure.records import EvalRecord, Ledger, RunRecord
from launcher.preflight import Prepared, default_run_folder
from launcher.world import World
from model.cost import flops_per_token


class Session:
    """One rank's view of a run's folder, from creation to summary."""

    def __init__(self, prepared: Prepared, world: World) -> None:
        self._prepared = prepared
        self._world = world
        self._started_s = time.monotonic()
        self._console = RunConsole(enabled=world.is_main)
        self.folder = RunFolder(_agree_on_folder(prepared, world))
        self._create_folder()
        self.clock = PhaseClock(world.device)
        loop = prepared.resolved.config.loop
        self._record = _run_record(prepared, world, self.folder.path.name)
        self.journal = Journal(
            self.folder.path,
            self._record,
            world,
            self.clock,
            self._console,
            log_every=loop.log_every,
            max_seconds=None if loop.max_minutes is None else 60 * loop.max_minutes,
            tensorboard=loop.tensorboard,
        )

    def __enter__(self) -> Self:
        self._console.__enter__()
        self._introduce()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._console.__exit__(kind, error, trace)
        self.journal.close()

    def enter(self, phase: str) -> None:
        """Note in `status.json` which part of the run this is."""
        if self._world.is_main:
            self.folder.write_status("running", phase=phase)

    def progress(self, name: str) -> Callable[[int, int], None]:
        """A (done, total) callback that moves a bar."""
        return lambda done, total: self._console.progress(name, done, total)

    def finish(self, test: EvalRecord, *, ledger: Ledger, steps: int) -> None:
        """Write the last records and, on the main rank, the summary."""
        self.journal.evaluated(test)
        self.journal.write(ledger)
        peaks = _gather(peak_bytes(self._world.device), self._world)
        if not self._world.is_main:
            return
        worst = max(range(len(peaks)), key=peaks.__getitem__)
        on_gpu = self._world.device.type == "cuda"
        summary = {
            "strategy": self._record.strategy,
            "model": self._record.model,
            "world_size": self._world.size,
            "steps": steps,
            "stopped_by": "max_minutes" if self.journal.out_of_time else "steps",
            "test_loss": test.loss,
            "perplexity": test.perplexity,
            "test_tokens": test.tokens,
            "tokens_per_s": self.journal.tokens_per_s(),
            "first_step_s": self.journal.first_step_s,
            "peak_bytes": peaks[worst],
            "peak_kind": "allocated on the GPU" if on_gpu else "resident set of the process",
            "peak_rank": worst,
            "duration_s": time.monotonic() - self._started_s,
        }
        self.folder.write_summary(summary)
        self.folder.write_status("completed", phase="end", exit_code=ExitCode.DONE)
        rate = summary["tokens_per_s"]
        self._console.line(
            f"done: test loss {test.loss:.4f}, perplexity {test.perplexity:.2f}, "
            f"peak {gib(peaks[worst])} ({summary['peak_kind']}, rank {worst}), "
            + (f"{rate:,.0f} tokens/s" if rate else "too few steps for a rate")
            + f", {summary['duration_s']:.0f} s; everything is in {self.folder.path}"
        )

    def _create_folder(self) -> None:
        if self._world.is_main:
            self.folder.create(self._prepared.resolved.config.flat())
        if self._world.size > 1:
            dist.barrier()

    def _introduce(self) -> None:
        record, resolved = self._record, self._prepared.resolved
        config = resolved.config
        ranks = "1 process" if record.world_size == 1 else f"{record.world_size} processes"
        place = record.device_name or record.device
        self._console.line(
            f"{record.model}: {record.parameters:,} parameters, {record.precision}; "
            f"{record.strategy} (= {record.strategy_also_called}) on {ranks}, {place}"
        )
        self._console.line(f"corpus: {self._prepared.corpus.description}")
        self._console.line(
            f"{record.steps} steps of {record.global_batch} x {record.seq_len} tokens: "
            f"micro-batch {record.micro_batch} x {record.world_size} ranks x "
            f"{record.accumulation} accumulated; seed {config.loop.seed}; run folder "
            f"{self.folder.path}"
        )


def _agree_on_folder(prepared: Prepared, world: World) -> Path:
    out = prepared.resolved.config.loop.out
    if out is None:
        chosen = [str(default_run_folder(prepared.resolved))] if world.is_main else [None]
        if world.size > 1:
            dist.broadcast_object_list(chosen, src=0)
        out = Path(str(chosen[0]))
    return out


def _gather(value: int, world: World) -> list[int]:
    if world.size == 1:
        return [value]
    values: list[int] = [0] * world.size
    dist.all_gather_object(values, value)
    return values


def _run_record(prepared: Prepared, world: World, name: str) -> RunRecord:
    resolved = prepared.resolved
    config, model = resolved.config, resolved.model
    assert config.data.seq_len and config.data.global_batch and config.loop.steps
    on_gpu = world.device.type == "cuda"
    return RunRecord(
        run=name,
        rank=world.rank,
        world_size=world.size,
        hostname=socket.gethostname(),
        device=str(world.device),
        device_name=torch.cuda.get_device_name(world.device) if on_gpu else None,
        strategy=resolved.strategy_label,
        strategy_also_called=resolved.also_called,
        precision=config.optim.precision,
        model=config.model.model,
        parameters=model.parameter_count,
        matmul_parameters=model.matmul_parameter_count,
        flops_per_token=flops_per_token(model, config.data.seq_len),
        micro_batch=config.data.micro_batch,
        accumulation=resolved.accumulation,
        global_batch=config.data.global_batch,
        seq_len=config.data.seq_len,
        steps=config.loop.steps,
        started_unix_s=time.time(),
    )
