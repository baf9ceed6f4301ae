"""When checkpoints are written and read; how is launcher/checkpoint/'s business."""

import contextlib
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

from launcher.checkpoint import Checkpoint, Checkpointer, Saved, SaveError
from launcher.checkpoint.checkpointer import Weights
from launcher.checkpoint.extra import Base, Extra
from launcher.config.resolve import Resolved
from launcher.data import Corpus
from launcher.measure.host_memory import available_host_bytes
from launcher.measure.memory import MemoryMeter
from launcher.parallel.world import World
from launcher.run.agreement import Agreement
from launcher.run.base import base_of, same_base
from launcher.run.console import RunConsole
from launcher.run.journal import Journal
from launcher.run.origin import Origin
from launcher.run.provenance import differences, meaning
from launcher.run.skips import SkippedSteps
from launcher.strategies.engine import Engine
from launcher.util.sizes import gib

STAGED_FRACTION = 0.8
"""Of free host memory: page-locked memory cannot be swapped, and data loading needs some, too."""


class Saves:
    """The checkpoints of one run, `RUN/checkpoints/step-00000100` and so on.

    A save that fails (no room on the disk) is reported and training goes on; the checkpoint before
    it stays. On a GPU a thread writes what was staged in host memory while training goes on; where
    host memory has no room for that, training waits until the checkpoint is written.
    """

    def __init__(
        self,
        resolved: Resolved,
        corpus: Corpus,
        world: World,
        folder: Path,
        *,
        journal: Journal,
        console: RunConsole,
        agreement: Agreement,
        skipped: SkippedSteps,
        memory: MemoryMeter,
    ) -> None:
        self._memory, self._world = memory, world
        self._resolved, self._corpus = resolved, corpus
        self._agreement = agreement
        self._skipped = skipped
        self._loop = resolved.config.loop
        self._journal = journal
        self._console = console
        self._folder = folder / "checkpoints"
        # A copy of what is on a disk for lack of memory would not fit into memory.
        on_disk = resolved.config.sharding.offload_optimizer == "nvme"
        self._asynchronous = world.device.type == "cuda" and not on_disk
        self._checkpointer: Checkpointer | None = None
        self._saved_step: int | None = None
        # By the clock: what the save that is under way is, and the last one, which goes for it.
        self._by_clock = False
        self._clock_step: int | None = None
        self.failure: SaveError | None = None
        """Why what the run ends with is not on disk."""

    def resume(self, engine: Engine, origin: Origin) -> int:
        """Fill a fresh engine from where the run begins; the step that it has reached."""
        if origin.source is None:
            if origin.reopens:
                self._console.line("nothing was saved yet: begins again at step 1")
            if (folder := self._resolved.config.model.init_from) is not None:
                with self._memory.checkpointing("resume"), self._weights(folder) as weights:
                    self._opened().begin_with(weights, engine)
                self._console.line(f"begins with the weights of {folder}")
            return 0
        with self._memory.checkpointing("resume"):
            loaded = self._opened().load(origin.source, engine)
            assert loaded is not None
            self._fill_base(loaded.checkpoint, engine)
        for reason in loaded.passed_over:
            self._console.line(f"skipped damaged checkpoint: {reason}", "warning")
        checkpoint = loaded.checkpoint
        self._skipped.total = checkpoint.extra.get("skipped_steps", 0)
        if (scale := checkpoint.extra.get("loss_scale")) is not None:
            engine.set_loss_scale(scale)
        changes = differences(checkpoint, self._resolved, self._corpus)
        self._console.line(f"resumed from {checkpoint.path} after step {checkpoint.step}")
        if changes:
            self._console.line(f"other than in the run that saved it: {', '.join(changes)}")
        self._journal.event(
            "resumed", checkpoint.step, checkpoint=str(checkpoint.path), changes=changes
        )
        if checkpoint.path.parent == self._folder:
            self._saved_step = checkpoint.step
            self._clock_step = checkpoint.step if checkpoint.extra.get("by_clock") else None
        return checkpoint.step

    def _fill_base(self, checkpoint: Checkpoint, engine: Engine) -> None:
        """What adapters are beside is not in their checkpoint."""
        if self._resolved.model.lora is None:
            return
        refusal = same_base(checkpoint, self._resolved) if self._world.is_main else None
        if (refusal := self._world.agreed(refusal)) is not None:
            raise refusal
        if (folder := self._resolved.config.model.init_from) is not None:
            with self._weights(folder) as weights:
                self._opened().begin_with(weights, engine, trained=False)

    @contextlib.contextmanager
    def _weights(self, folder: Path) -> Iterator[Weights]:
        """Open the weights of `--init-from`, quantized where the run holds them so."""
        from launcher.checkpoint.pretrained.quantized import Quantized
        from launcher.checkpoint.pretrained.stored import open_stored

        model = self._resolved.model
        with open_stored(folder) as stored:
            yield stored if model.quantize_base == "none" else Quantized(stored, model)

    def after_step(self, step: int, engine: Engine) -> bool:
        """Save where the schedule of saves says so; whether it did."""
        if self._checkpointer is not None:
            self._report(self._checkpointer.poll)
        every = self._loop.save_every
        planned = every is not None and every > 0 and step % every == 0
        # What is saved at the end anyway is not the clock's.
        if not planned and (not self._agreement.save_is_due or step == self._resolved.steps):
            return False
        self._journal.secure()
        if self._skipped.lost_since is None:
            self._save(step, engine, by_clock=not planned)
        else:
            # The checkpoint before must not go for weights that are lost.
            self._console.line(f"not saved: diverged since step {self._skipped.lost_since}")
        self._agreement.saved()
        return True

    def after_training(self, step: int, engine: Engine, *, preempted: bool) -> None:
        """Save what training has come to, unless it is on disk already, or nobody wants it.

        Raises:
            SaveError: of a preempted run, which has nothing to go on from; otherwise it is in
                `failure`.
        """
        self.finish()
        if self._saved_step != step and (preempted or self._loop.saves_last):
            self._journal.secure()
            self._save(step, engine)
            self.finish()
        if preempted and self.failure is not None:
            raise self.failure

    def _save(self, step: int, engine: Engine, *, by_clock: bool = False) -> None:
        """Save now; on a GPU writing goes on in the background."""
        self.finish()
        self._by_clock = by_clock
        self.failure = None
        extra: Extra = {
            **meaning(self._resolved, self._corpus),
            "loss_scale": engine.loss_scale(),
            "skipped_steps": self._skipped.total,
            "by_clock": by_clock,
        }
        replaces = self._clock_step if self._loop.keep is None else None
        if (base := self._base) is not None:
            extra["base"] = base
        with self._memory.checkpointing("save"):
            held = self._report(
                lambda: self._opened().save(
                    step, engine, extra, replaces=replaces, staging_bytes=self._staging_bytes()
                )
            )

        if held and self._asynchronous:
            self._console.line("training waited for this save: no host memory to stage it")

    def _staging_bytes(self) -> int:
        """This rank's part of the host memory that an asynchronous save may take."""
        return int(STAGED_FRACTION * available_host_bytes()) // self._world.local_size

    @cached_property
    def _base(self) -> Base | None:
        """Of adapters; read by who writes it."""
        return base_of(self._resolved) if self._world.is_main else None

    def finish(self) -> None:
        """Wait until everything is on disk."""
        if self._checkpointer is not None:
            self._report(self._checkpointer.wait)

    def _opened(self) -> Checkpointer:
        # Opening is collective: it happens where all ranks save or load.
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(
                self._folder, keep=self._loop.keep, asynchronous=self._asynchronous
            )
        return self._checkpointer

    def _report(self, save: Callable[[], Saved | None]) -> bool:
        """Show and record the outcome of a save; return whether one was written by now."""
        try:
            saved = save()
        except SaveError as error:
            self.failure = error
            self._console.line(f"could not save: {error}", "error")
            self._journal.event("save_failed", reason=str(error))
            return False
        if saved is None:
            return False
        self._saved_step = saved.step
        self._clock_step = saved.step if self._by_clock else None
        self._console.line(
            f"saved {saved.path} ({gib(saved.size_bytes)} in {saved.duration_s:.1f} s)"
        )
        self._journal.event("saved", saved.step, path=str(saved.path), size_bytes=saved.size_bytes)
        return True
