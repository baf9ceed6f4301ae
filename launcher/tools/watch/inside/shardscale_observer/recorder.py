"""Write what each step, phase and period of this process needed."""

from __future__ import annotations

import importlib
import os
import time
import weakref
from typing import Any

from shardscale_observer.beside import note_process, note_rank
from shardscale_observer.clock import APART, Clock
from shardscale_observer.compiled import COMPILED
from shardscale_observer.guard import FAULTS
from shardscale_observer.history import History
from shardscale_observer.leaving import leave
from shardscale_observer.limit import Limit, unseen
from shardscale_observer.owners import Owners
from shardscale_observer.parts import outermost_first
from shardscale_observer.phase_log import PhaseLog
from shardscale_observer.rank_file import RankFile, is_distributed
from shardscale_observer.reading import alive, libraries_in_use
from shardscale_observer.sampler import Sampler

LEDGER_STEPS = (1, 3)  # the first step, and one whose allocations repeat from then on
# NCCL's watchdog looks every 100 ms, and only then lets go of a step's buffers, such as DDP's first
# buckets. A step with kernels takes longer than one without.
_WATCHDOG_S = 0.25
_STEP_PEAKS = ("allocated_peak_bytes", "reserved_peak_bytes")


class Recorder:
    """The phase that the process is in, and the records of its rank."""

    def __init__(self, torch: Any, settings: dict[str, Any], peaks: Any) -> None:
        self.torch = torch
        self.settings = settings
        self.rehearses = settings["mode"] == "rehearse"
        self.peaks = peaks
        self.limit = Limit(settings.get("steps"))
        self.file: RankFile | None = None
        self.history: History | None = None
        self.phase, self.before_evaluation = "load", "other"
        self.steps = 0  # completed
        self.in_step = self.stepped = False
        self.in_graphs: set[int] = set()  # optimizers whose step a CUDA graph holds
        self.depth = {"backward": 0, "optimizer": 0}
        self.modules: list[Any] = []
        """Modules that are in their forward now, outermost first."""
        self.names: dict[int, str] = {}
        self.roots: weakref.WeakSet[Any] = weakref.WeakSet()
        self.prefixes: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._parameters = 0  # of the largest root
        self._shape: dict[str, Any] = {}  # of its batches
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.has_optimizer: bool | None = None
        """False where the program updates its weights by itself; None while that is not known."""
        self.backwards = self._backwards_before = 0  # and those before this step
        self.stepping: set[int] = set()
        """Optimizers that have stepped in this step."""
        self._in_timeline: list[frozenset[int]] = []
        self.device: int | None = None
        self.values: Any = None
        """Reads of values in a rehearsal (values.Values); None elsewhere."""
        self.timeline: Any = None
        """One more step of a rehearsal (shardscale_rehearsal/timeline.py); None elsewhere."""
        self.closed = self.failed = False
        self.evaluated_after: set[int] = set()
        """Steps that an evaluation followed, or a generation."""
        self._clock: Clock | None = None
        self._sampler: Sampler | None = None
        self.losses: list[Any] = []
        self.tokens: int | None = None
        self.lr: float | None = None
        self.data_ranks: int | None = None
        self._log = PhaseLog()
        self._step_peak: tuple[int, ...] = (0, 0)  # allocated and reserved
        self._sampled = True
        self._faults = len(FAULTS)  # that are written, or a parent's

    def end(self, reason: str) -> None:
        """The program ends: write what is known by now. Later calls do nothing."""
        if self.rehearses and self.file is None and not self.closed:
            note_process(self)
        if self.closed or self.file is None or self._clock is None:
            return
        self.closed = True
        COMPILED.note(self)
        if self.stepped:
            self._end_step()
            # a program may give its weights other storages after a step
            self.mark("owners", owned=True)
        self._close_phase()
        # a device that has failed may never reach the marks
        self._write_steps(wait=not self.failed)
        self._stop_recording("")
        for record in self._log.records(with_memory=self.device is not None):
            self.file.add("phase", **record)
        for read in self.values.places.values() if self.values is not None else ():
            self.event("value_read", **read)
        self.event(
            "program_ended",
            reason=reason,
            steps=self.steps,
            evaluated_after=len(self.evaluated_after - {0}),
            libraries=libraries_in_use(),
            has_optimizer=self.has_optimizer,
            turns=len(self.limit.turns),
            **(unseen(self) if self.rehearses else {}),
        )
        if self.device is not None:
            note_rank(self, self.device)
        if self._sampler is not None:
            self._sampler.stop()

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        if phase == self.phase:
            return
        if self.timeline is not None:
            self.timeline.enters(phase, before=self.phase)
            self.phase = phase
            return
        if self.closed or self.captures():
            return
        self._close_phase()
        self.phase = phase
        if phase == "evaluation":
            self.evaluated_after.add(self.steps + self.stepped)
        self.mark("phase", f"{self._period()}/{phase}")

    def captures(self) -> bool:
        """Return True while a CUDA graph is recorded, in which nothing may be measured."""
        return self.device is not None and self.torch.cuda.is_current_stream_capturing()

    @property
    def recording(self) -> bool:
        """True while the allocator's history is recorded."""
        return self.history is not None and self.history.recording

    def mark(self, kind: str, name: str = "", *, owned: bool = False) -> None:
        """Mark the allocator's history, if it is recorded; `owned`: with the owners of storages."""
        if self.history is not None and self.history.recording:
            owners = self.owners().on_device("cuda") if owned else {}
            self.history.mark(kind, name, owners)

    def begin_step(self) -> None:
        if self.captures():
            return  # the replays are the steps
        COMPILED.note(self)
        if self.timeline is not None:
            if self.stepped and self._round_ends():
                self._end_timeline()
            return
        if self.stepped:
            self._end_step()
            if self.rehearses and is_distributed():
                time.sleep(_WATCHDOG_S)
        if self.in_step:
            return
        if self.limit.is_reached(self):
            self.end("steps")
            self._begin_timeline()
            return
        number = self.steps + 1
        # Reading the allocator's statistics takes tens of microseconds, so later steps are sampled.
        self._sampled = self.rehearses or number <= 10 or number % 10 == 0
        # loading the model and the data before the first step is no part of it
        if self.steps == 0 and self._clock is not None:
            self._close_phase()
            self.phase = "other"
            self._clock.drop()
        self.in_step = True
        if self.history is not None and not self.rehearses and number in LEDGER_STEPS:
            self.history.start()
        self.mark("owners", owned=True)

    def _begin_timeline(self) -> None:
        """Let the program take one more step, whose bytes are not recorded, to see what it asks of
        the device. Whatever goes wrong then ends the program as if all had been seen."""
        try:
            timeline: Any = importlib.import_module("shardscale_rehearsal.timeline")
            self.timeline = timeline.Timeline()
            self.phase, self.in_step, self.stepped = "other", True, False
            if why := self.timeline.begin():
                self.ends_untimed(why)
        except Exception as error:
            self.ends_untimed(repr(error))

    def _round_ends(self) -> bool:
        """Return True once every optimizer that steps in turn has done so in the timeline."""
        self._in_timeline.append(frozenset(self.stepping))
        self.stepping.clear()
        self.stepped = False
        if alive(self.limit.turns, self.optimizers) <= set(self._in_timeline):
            return True
        if len(self._in_timeline) >= self.steps:
            self.ends_untimed(f"not all optimizers that step in turn did in {self.steps} steps")
        return False

    def _end_timeline(self) -> None:
        assert self.file is not None
        try:
            path = os.path.join(self.settings["folder"], f"timeline-rank{self.file.rank}")
            if why := self.timeline.end(path):
                self.ends_untimed(why)
        except Exception as error:
            self.ends_untimed(repr(error))
        leave()

    def ends_untimed(self, why: str, **more: Any) -> None:
        """End the program without a timeline, whatever happens: its bytes are known."""
        try:
            self.event("no_timeline", reason=why[:1000], **more)
        finally:
            leave()

    def _end_step(self) -> None:
        self._close_phase()
        self.phase, self.in_step, self.stepped = "other", False, False
        self.steps += 1
        self.limit.step_ends(self.steps, self.stepping, self.optimizers)
        self.stepping.clear()
        assert self._clock is not None
        content = {
            "step": self.steps,
            "losses": self.losses,
            "lr": self.lr,
            "tokens": self.tokens,
            "peaks": self._step_peak if self.device is not None and self._sampled else None,
        }
        self.losses, self.tokens, self.lr, self._step_peak = [], None, None, (0, 0)
        if self.values is not None:
            self.values.next_step()
        self._clock.end_step(content)
        self._write_steps(wait=False)
        if self.steps in LEDGER_STEPS:
            if not self.rehearses:
                self._stop_recording(f"-step{self.steps}")
            self._write_held()

    def _write_steps(self, *, wait: bool) -> None:
        assert self._clock is not None
        assert self.file is not None
        for seconds, content in self._clock.take(wait=wait):
            number, peaks = content["step"], content["peaks"]
            losses = [loss() for loss in content["losses"] if loss is not None]
            known = [loss for loss in losses if loss is not None]
            memory = {} if peaks is None else dict(zip(_STEP_PEAKS, peaks))  # noqa: B905
            self.file.add(
                "step",
                step=number,
                loss=sum(known) if known else None,  # whose gradient the optimizer gets
                grad_norm=None,
                lr=content["lr"],
                tokens=content["tokens"],
                applied=True,
                **{name: value for name, value in seconds.items() if name != "other_s"},
                **memory,
            )
            self._log.add_step(number, seconds)
        for fault in FAULTS[self._faults :]:
            self.event("observer_fault", **fault)
        self._faults = len(FAULTS)

    def _period(self) -> str:
        if self.phase in APART:
            return "save" if self.phase == "checkpoint" else "evaluation"
        if not self.in_step and not self.steps:
            return "init"
        return "first_step" if self.steps + self.in_step <= 1 else "steady"

    def _close_phase(self) -> None:
        if self._clock is None:
            return
        self._clock.close(self.phase)
        peaks = (0, 0)
        if self.device is not None and self._sampled:
            peaks = self.peaks.take(self.device)
        self._log.add_peaks(self._period(), "build" if self.phase == "load" else self.phase, peaks)
        if self.phase not in APART:
            self._step_peak = tuple(map(max, self._step_peak, peaks))

    def owners(self) -> Owners:
        return Owners(outermost_first(self.roots), list(self.optimizers), self.prefixes)

    def _write_held(self) -> None:
        assert self.file is not None
        lines = self.owners().ledger(on_gpu=self.device is not None)
        self.file.add("ledger", moment="held", step=self.steps, phase=None, **lines)

    def _stop_recording(self, suffix: str) -> None:
        if self.recording and self.file is not None and self.file.is_of_rank():
            name = f"allocations-rank{self.file.rank}{suffix}"
            self.history.stop(self.settings["folder"], name)  # type: ignore[union-attr]

    def event(self, name: str, **detail: Any) -> None:
        if self.file is not None:
            step = self.steps + 1 if self.in_step else self.steps
            self.file.event(name, step, **detail)
