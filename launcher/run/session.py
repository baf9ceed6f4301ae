"""Session: measurements, records, saves and outcome of one run, around the training loop."""

import contextlib
import gc
import math
import os
import shlex
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from launcher.measure.limit import limit_memory
from launcher.measure.loggers import Loggers
from launcher.measure.memory import TracedMemory, dump_snapshot, memory_meter
from launcher.measure.phases import PhaseClock
from launcher.measure.records import WARMUP_STEPS, EvalRecord, SampleRecord, Status, Summary
from launcher.measure.sampler import Sampler, mean_power_w
from launcher.parallel.world import OWN_AGENT, World
from launcher.run.agreement import Agreement, stop_exit_code, stop_reason
from launcher.run.console import RunConsole
from launcher.run.evaluation import refuse_diverged
from launcher.run.forecast_protocol import LoadForecast
from launcher.run.journal import Journal
from launcher.run.prepare import Prepared
from launcher.run.record_file import rewind_others
from launcher.run.resume import Announce, open_folder
from launcher.run.saves import Saves
from launcher.run.steps import EndedStep, SkippedSteps
from launcher.run.summary import (
    amount_line,
    closing_lines,
    introduction,
    phase_records,
    run_record,
    summarize,
)
from launcher.strategies.engine import Engine, StepResult
from launcher.strategies.ledger import Ledger
from launcher.util.errors import ExitCode


class Session:
    """One rank's run around the training loop, from an empty folder to the summary."""

    def __init__(
        self, prepared: Prepared, world: World, announce: Announce = lambda folder: None
    ) -> None:
        self._prepared = prepared
        self.resolved = prepared.resolved
        self._world = world
        self._config = prepared.resolved.config
        self._started_s = time.monotonic()
        self.where = "start"
        self.begun = 0  # steps, in this attempt
        self.step = 0
        self.console = RunConsole(enabled=world.is_main, log_level=self._config.loop.log_level)
        self.folder, self._resume = open_folder(
            prepared.resolved, prepared.corpus.tokenizer_path, prepared.resume, world, announce
        )
        self.clock = PhaseClock(world.device)
        loop, measure = self._config.loop, self._config.measure
        self.memory = memory_meter(world.device, trace=measure.memory_trace)
        self.record = run_record(prepared, world, self.folder.path.name)
        self.agreement = Agreement(
            world,
            log_every=measure.log_every,
            max_seconds=60 * (loop.max_minutes or math.inf),
            save_seconds=loop.saves_after_s,
        )
        self.skipped = SkippedSteps()
        self.journal = Journal(
            self.folder.path,
            self.record,
            world,
            self.clock,
            self.console,
            agreement=self.agreement,
            skipped=self.skipped,
            loggers=Loggers(self.folder.path, measure.loggers * world.is_main, self._config.flat()),
            stops_after=loop.stop_after,
            reopens=self._resume.reopens,
        )
        self.sampler = Sampler.of(world.device, self.journal.from_sampler)
        self._engine: Engine | None = None
        self._peak: Ledger | None = None
        self._saves = Saves(
            prepared, world, self.folder.path, journal=self.journal, memory=self.memory
        )
        self._energy_before = self._energy_after = self.sampler.energy
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        measure = self._config.measure
        self._stack.enter_context(self.console.bars())
        if isinstance(self.memory, TracedMemory):
            self._stack.enter_context(self.memory.trace)
        self.sampler.start()
        if measure.memory_trace and self._world.device.type == "cuda":
            torch.cuda.memory._record_memory_history()
        if measure.memory_limit is not None:
            limit_memory(measure.memory_limit, self._world.device)
        self.console.lines(introduction(self._prepared, self.record, self.folder.path, self._world))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stack.close()
        if kind is None:
            self.close()  # else when the failure is recorded: a logger may take half a minute

    def close(self) -> None:
        """Stop sampling, and close files and loggers."""
        self.sampler.stop()
        self.journal.close()

    def enter(self, part: str) -> None:
        """Begin a part of the run: build, train or test."""
        self.where = part
        if self._world.is_main:
            self.folder.write_status(Status(state="running", phase=part))

    def watch(self, engine: Engine) -> None:
        """Load the state to resume from into the built engine, and attribute its bytes."""
        self._engine = engine
        self.memory.watch(engine)
        self.step = self.resumed_step = self._saves.resume(engine, self._resume)
        if self._resume.reopens:
            self.journal.file.rewind(self.step)
            if self._world.is_main:
                rewind_others(self.folder.path, self._world.size, self.step)

    def steps(self) -> Iterator[int]:
        """Yield step numbers until the schedule, the time, `--stop-after` or a signal ends them."""
        assert self._engine is not None
        stop = self._config.loop.stop_after or self.record.steps
        first = self.step + 1
        for step in range(first, min(stop, self.record.steps) + 1):
            self.step = step
            self.begun += 1
            self.memory.period("first_step" if step == first else "steady")
            self.memory.begin_step(step - first + 1)  # ledgers are of a start's first steps
            if step == first + WARMUP_STEPS:
                self._energy_before = self.sampler.energy
            yield step
            if step == first:
                gc.collect()  # compilers leave tensors of their first call in reference cycles
            if self._saves.after_step(step, self._engine) or step == first:
                self.clock.restart()  # a save, and the collection, belong to no step
            if self.agreement.time_is_up or self.agreement.preempted:
                break
        self.journal.flush()
        self.skipped.refuse_lost()  # before the save: lost weights replace no checkpoint
        reached = "stop_after" if self.step < self.record.steps else "steps"
        self._stopped_by = "max_minutes" if self.agreement.time_is_up else reached
        self._saves.after_training(self.step, self._engine, preempted=self.agreement.preempted)
        self._energy_after = self.sampler.energy
        self.journal.write(self._engine.count_states().ledger(self._world.device))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure time and memory of a phase: data, forward, backward or step."""
        self.where = f"{name} of step {self.step}"
        with self.clock.phase(name), self.memory.phase(name):
            yield

    def step_done(self, *, loss: Tensor, result: StepResult, lr: float) -> None:
        """Record an ended step; `loss` is this rank's mean over its micro-batches."""
        ledger = self.memory.end_step(self.step)
        grad_norm, applied = result
        self.journal.step(
            EndedStep(
                step=self.step,
                loss=loss,
                grad_norm=grad_norm,
                applied=applied,
                lr=lr,
                routed=None if self._engine is None else self._engine.routed(),
                peak_bytes=self.memory.step_peak_bytes(),
            )
        )
        if ledger is not None:
            self.journal.write(ledger)
            self._peak = ledger

    def evaluated(self, record: EvalRecord) -> None:
        """Record an evaluation between steps."""
        self.journal.evaluated(record)
        self.clock.restart()

    def sampled(self, record: SampleRecord, *, shown: bool) -> None:
        """Record a generated text, between steps."""
        self.journal.sampled(record, shown=shown)
        self.clock.restart()

    def begin_test(self) -> None:
        """Begin the test split."""
        self.enter("test")
        self.agreement.turn_to_test()

    def end_test(self) -> None:
        """Save a run that was stopped meanwhile; its next start reads the test split."""
        if self.agreement.preempted and self._engine is not None:
            self._saves.after_training(self.step, self._engine, preempted=True)

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of this rank's process when nothing has failed."""
        # Our own torchrun reads status.json; another exit code than 0 would make it restart ranks.
        if self.agreement.preempted and OWN_AGENT not in os.environ:
            return stop_exit_code(self.agreement.stop_signal)
        return ExitCode.DONE

    def finish_preempted(self) -> None:
        """Record and print that the run is saved and can be resumed."""
        self.journal.secure()
        self.console.at_the_end()
        if self._world.is_main:
            signal, phase = self.agreement.stop_signal, f"step {self.step}"
            when = f"after {phase}" if self.begun else "before its first step"
            reason, code = stop_reason(signal), stop_exit_code(signal)
            status = Status(state="preempted", phase=phase, reason=reason, exit_code=code)
            self.folder.write_status(status)
            out = shlex.quote(str(self.folder.path))
            self.console.line(
                f"preempted {when}: resume with the same command and --out {out} --resume auto"
            )

    def finish(self, test: EvalRecord | None) -> Summary:
        """Write the last records and, on the main rank, the summary.

        Raises:
            Failure: on all ranks, when the run has diverged, or its results are not on disk.
        """
        if test is not None:
            self.journal.evaluated(test)
            refuse_diverged(test)
        self.journal.secure()
        if self._config.measure.memory_trace and self._world.device.type == "cuda":
            dump_snapshot(self.folder.path, self._world)
        for record in phase_records(self.journal.times, self.memory.peaks):
            self.journal.write(record)
        known = Summary(
            resumed_step=self.resumed_step,
            train_tokens=self._saves.tokens_read(self.step),
            skipped_steps=self.skipped.total,
            stopped_by=self._stopped_by,
            test_split_tokens=self._prepared.corpus.test.all_target_count(self.resolved.seq_len),
            test_cut_short=self.agreement.time_is_up and test is not None,
            duration_s=time.monotonic() - self._started_s,
        )
        summary, records_missing = summarize(
            known,
            self.record,
            self._world,
            self.journal,
            test,
            corpus=self._prepared.corpus,
            memory=self.memory,
            samples=self.sampler.stop(),
            training_power_w=mean_power_w(self._energy_before, self._energy_after),
        )
        failure = self._saves.failure or records_missing
        if self._world.is_main:
            failure = self.folder.conclude(summary, failure)
        failure = self._world.agreed(failure)  # all ranks end as the main one does
        if failure is not None:
            raise failure
        if self._world.is_main:
            self.console.line(amount_line(summary))
            self.console.at_the_end()
            self.console.lines(closing_lines(summary, self.folder.path))
        return summary

    def compare(self, summary: Summary, load_forecast: LoadForecast) -> None:
        """Print and record the prediction of the run beside its measurements, if there are any."""
        if self._peak is None or not self._world.is_main:
            return
        lines, record, ledger = load_forecast().against_run(
            self.resolved,
            self._world,
            self._peak,
            self.journal.times.durations_s,
            peaks=self.memory.peaks,
            resumed=self.resumed_step > 0,
        )
        if ledger is not None:
            self.journal.write(ledger)
        with contextlib.suppress(OSError):  # the summary is there, without the plan
            self.folder.write_summary(replace(summary, plan=record))
        self.console.lines(lines)
