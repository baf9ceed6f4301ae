"""Saves of a run: when checkpoints are written, and what a run resumes from."""

import contextlib
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

from launcher.checkpoint import Checkpoint, Checkpointer, Saved, SaveError
from launcher.checkpoint.checkpointer import ReadableWeights
from launcher.checkpoint.extra import Base, Extra
from launcher.checkpoint.store import candidates
from launcher.config.resolve import Resolved
from launcher.data import Corpus
from launcher.data.tokenizer import tokenizer_fingerprint
from launcher.measure.host_memory import available_host_bytes
from launcher.measure.memory import MemoryMeter
from launcher.parallel.world import World
from launcher.run.journal import Journal
from launcher.run.prepare import Prepared
from launcher.run.resume import Resume
from launcher.strategies.engine import Engine
from launcher.util.sizes import gib

STAGED_FRACTION = 0.8
"""Fraction of free host memory: page-locked memory cannot be swapped, and data loading needs some,
too."""


def run_entries(resolved: Resolved, corpus: Corpus) -> Extra:
    """Return what a checkpoint records of the run that saves it."""
    found: Extra = {
        "config": resolved.config.flat(),
        "model": resolved.model,
        "corpus": corpus.fingerprint,
        "steps": resolved.steps,
    }
    if corpus.tokenizer_path is not None:
        found["tokenizer"] = tokenizer_fingerprint(corpus.tokenizer_path)
    return found


class Saves:
    """The checkpoints of one run, `RUN/checkpoints/step-00000100` and so on.

    A save that fails (no room on the disk) is reported and training goes on; the checkpoint before
    it stays. On a GPU a thread writes what was staged in host memory while training goes on; where
    host memory has no room for that, training waits until the checkpoint is written.
    """

    def __init__(
        self,
        prepared: Prepared,
        world: World,
        folder: Path,
        *,
        journal: Journal,
        memory: MemoryMeter,
    ) -> None:
        self._memory, self._world = memory, world
        self._resolved, self._corpus = prepared.resolved, prepared.corpus
        self._loop = self._resolved.config.loop
        self._journal, self._console = journal, journal.console
        self._agreement, self._skipped = journal.agreement, journal.skipped
        self._folder = folder / "checkpoints"
        # States that are on a disk for want of memory cannot be staged in memory.
        on_disk = self._resolved.config.sharding.offload_optimizer == "nvme"
        self._asynchronous = world.device.type == "cuda" and not on_disk
        self._checkpointer: Checkpointer | None = None
        self._saved_step: int | None = None
        # Timed saves: whether the running save is one, and the last one's step, which it replaces.
        self._by_clock = False
        self._dtype: str | None = None
        self._hidden_window: int | None = None
        self._clock_step: int | None = None
        self._resumed_step = self._resumed_tokens = 0
        self.failure: SaveError | None = None
        """Why the latest state is not on disk."""
        if self._resolved.config.measure.memory_limit is not None:
            # Before the limit is taken: the stacks of its group's threads would count as tensors.
            self._opened()

    def resume(self, engine: Engine, resume: Resume) -> int:
        """Load a fresh engine's state, if there is any; returns the step that it has reached."""
        if resume.source is None:
            if resume.reopens:
                self._console.line("nothing was saved yet: starts again at step 1")
            if (folder := self._resolved.config.model.init_from) is not None:
                with self._memory.apart("resume", "checkpoint"), self._weights(folder) as weights:
                    self._opened().begin_with(weights, engine)
                from launcher.checkpoint.pretrained.stored import dtype_at

                self._dtype = dtype_at(folder)
                self._console.line(f"begins with the weights of {folder}")
            return 0
        from launcher.checkpoint.pretrained.stored import dtype_of_base
        from launcher.run.provenance import differences, tokens_of

        with self._memory.apart("resume", "checkpoint"):
            checkpoint, passed_over = self._opened().load(resume.source, engine)
            self._fill_base(checkpoint, engine)
        for reason in passed_over:
            self._console.line(f"skipped damaged checkpoint: {reason}", "warning")
        self._dtype = dtype_of_base(checkpoint)
        self._hidden_window = checkpoint.extra.get("hidden_window")
        self._resumed_step, self._resumed_tokens = checkpoint.step, tokens_of(checkpoint)
        self._skipped.total = checkpoint.extra.get("skipped_steps", 0)
        if (scale := checkpoint.extra.get("loss_scale")) is not None:
            engine.set_loss_scale(scale)
        changes = differences(checkpoint, self._resolved, self._corpus)
        self._console.line(f"resumed from {checkpoint.path} after step {checkpoint.step}")
        if changes:
            self._console.line(f"differs from the run that saved it: {', '.join(changes)}")
        self._journal.event(
            "resumed", checkpoint.step, checkpoint=str(checkpoint.path), changes=changes
        )
        # Another run's checkpoint (`--resume RUN`) does not count as saved in this folder.
        if checkpoint.path.parent == self._folder:
            self._saved_step = checkpoint.step
            self._clock_step = checkpoint.step if checkpoint.extra.get("by_clock") else None
        return checkpoint.step

    def _fill_base(self, checkpoint: Checkpoint, engine: Engine) -> None:
        """Load the frozen weights beside adapters, which their checkpoint does not hold."""
        if self._resolved.model.lora is None:
            return
        from launcher.run.provenance import same_base

        refusal = same_base(checkpoint, lambda: self._base) if self._world.is_main else None
        if (refusal := self._world.agreed(refusal)) is not None:
            raise refusal
        if (folder := self._resolved.config.model.init_from) is not None:
            with self._weights(folder) as weights:
                self._opened().begin_with(weights, engine, trained=False)

    @contextlib.contextmanager
    def _weights(self, folder: Path) -> Iterator[ReadableWeights]:
        """Open the weights of `--init-from`, quantized if the run keeps them quantized."""
        from launcher.checkpoint.pretrained.stored import open_stored
        from launcher.checkpoint.pretrained.transformed import Quantized

        model, by = self._resolved.model, self._resolved.config.model.decoder
        with open_stored(self._agreed_place(folder), by) as stored:
            if self._base_is_saved and stored.checkpoint is not None and stored.config.lora is None:
                # Now: a run that is alive may save others before the first save here.
                self._base = stored.base()
            yield stored if model.quantize_base == "none" else Quantized(stored, model)

    def _agreed_place(self, folder: Path) -> Path:
        """Return, of a run, the checkpoint that is the newest to the main rank: the run may save
        another one before all ranks have looked."""
        from launcher.config.init_from import HF_CONFIG

        if (folder / HF_CONFIG).is_file():
            return folder
        there = candidates(folder)
        name = self._world.agreed(there[0].name)
        return folder if there == [folder] else there[0].with_name(name)

    def tokens_read(self, step: int) -> int:
        """Return the tokens that all starts have read up to a step of this one."""
        sequences = (step - self._resumed_step) * self._resolved.global_batch
        return self._resumed_tokens + sequences * self._resolved.seq_len

    def after_step(self, step: int, engine: Engine) -> bool:
        """Save if a save is due; returns whether one was."""
        if self._checkpointer is not None:
            self._report(self._checkpointer.poll)
        every = self._loop.save_every
        planned = every is not None and every > 0 and step % every == 0
        # The save at the end replaces a timed one.
        if not planned and (not self._agreement.save_is_due or step == self._resolved.steps):
            return False
        self._journal.secure()
        if self._skipped.lost_since is None:
            self._save(step, engine, by_clock=not planned)
        else:
            # A timed save removes the one before, which lost weights must not.
            self._console.line(f"not saved: diverged since step {self._skipped.lost_since}")
        self._agreement.saved()
        return True

    def after_training(self, step: int, engine: Engine, *, preempted: bool) -> None:
        """Save the final state, unless it is on disk already or the run keeps none.

        Raises:
            SaveError: of a preempted run, which could not be resumed; otherwise it is in `failure`.
        """
        self.finish()  # sets `_saved_step` where a save still runs
        if self._saved_step != step and (preempted or self._loop.saves_last):
            self._journal.secure()
            self._save(step, engine)
            self.finish()
        if preempted and self.failure is not None:
            raise self.failure

    def _save(self, step: int, engine: Engine, *, by_clock: bool = False) -> None:
        """Save now; on a GPU a thread writes."""
        # one save at a time
        self.finish()
        self._by_clock = by_clock
        self.failure = None
        extra: Extra = {
            **run_entries(self._resolved, self._corpus),
            "tokens": self.tokens_read(step),
            "loss_scale": engine.loss_scale(),
            "skipped_steps": self._skipped.total,
            "by_clock": by_clock,
        }
        # with --keep, timed checkpoints are counted like the others
        replaces = self._clock_step if self._loop.keep is None else None
        if (base := self._base) is not None:
            extra["base"] = base
        if self._dtype is not None:
            extra["dtype"] = self._dtype
        if self._hidden_window is not None:
            extra["hidden_window"] = self._hidden_window
        # this rank's part
        staging_bytes = int(STAGED_FRACTION * available_host_bytes()) // self._world.local_size
        with self._memory.apart("save", "checkpoint"):
            held = self._report(
                lambda: self._opened().save(
                    step, engine, extra, replaces=replaces, staging_bytes=staging_bytes
                )
            )
        if held and self._asynchronous:  # written by now, although a thread was to do it
            self._console.line("training waited for this save: no host memory to stage it")

    @property
    def _base_is_saved(self) -> bool:
        return self._resolved.model.lora is not None and self._world.is_main

    @cached_property
    def _base(self) -> Base | None:
        """Identity of the weights beside adapters, which the main rank writes."""
        if not self._base_is_saved:
            return None
        from launcher.run.provenance import base_of

        return base_of(self._resolved)

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
