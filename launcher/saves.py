"""When checkpoints are written and read; how is launcher/checkpoint/'s business."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from launcher.checkpoint import Checkpointer, Saved, SaveError
from launcher.measure.agreement import Agreement
from launcher.measure.console import RunConsole
from launcher.measure.journal import Journal
from launcher.measure.skips import SkippedSteps
from launcher.origin import Origin
from launcher.resolve import Resolved
from launcher.sizes import gib
from launcher.strategies.engine import Engine, LossScale
from launcher.world import World


class Saves:
    """The checkpoints of one run, `RUN/checkpoints/step-00000100` and so on.

    A save that fails (no room on the disk) is said loudly and training goes on; the checkpoint
    before it stays. On a GPU writing goes on beside training. `measured` takes the memory peaks of
    a save or a resume apart from those of training.
    """

    def __init__(
        self,
        resolved: Resolved,
        world: World,
        folder: Path,
        *,
        journal: Journal,
        console: RunConsole,
        agreement: Agreement,
        skipped: SkippedSteps,
        measured: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._measured = measured
        self._resolved = resolved
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

    def resume(self, engine: Engine, origin: Origin) -> int:
        """Fill a fresh engine from where the run begins; the step that it has reached."""
        if origin.source is None:
            if origin.reopens:
                self._console.line("nothing was saved yet: begins again at step 1")
            return 0
        with self._measured("resume"):
            loaded = self._opened().load(origin.source, engine)
        assert loaded is not None
        for reason in loaded.passed_over:
            self._console.line(f"passed over: {reason}", "warning")
        checkpoint = loaded.checkpoint
        self._skipped.total = checkpoint.extra.get("skipped_steps", 0)
        if (scale := checkpoint.extra.get("loss_scale")) is not None:
            engine.set_loss_scale(LossScale(**scale))
        self._console.line(f"resumed from {checkpoint.path} after step {checkpoint.step}")
        self._journal.event("resumed", checkpoint.step, checkpoint=str(checkpoint.path))
        return checkpoint.step

    def after_step(self, step: int, engine: Engine) -> bool:
        """Save where the schedule of saves, or the end of training, says so; whether it did."""
        if self._checkpointer is not None:
            self._report(self._checkpointer.poll)
        every = self._loop.save_every
        at_end = step == self._resolved.steps and (every or self._loop.save_minutes)
        last = step == self._loop.stop_after or at_end
        due = self._agreement.save_is_due or (every is not None and step % every == 0)
        if not last and not due:
            return False
        self.save(step, engine)
        return True

    def save(self, step: int, engine: Engine) -> None:
        """Save now; on a GPU writing goes on in the background."""
        self.finish()
        with self._measured("save"):
            self._report(lambda: self._opened().save(step, engine, self._extra(engine)))
        self._agreement.saved()

    def save_for_good(self, step: int, engine: Engine) -> None:
        """Save what the run ends with, unless it is on disk already.

        Raises:
            SaveError: on every rank; then there is nothing to go on from.
        """
        self.finish()
        if self._saved_step != step:
            with self._measured("save"):
                saved = self._opened().save(step, engine, self._extra(engine))
            self._tell(saved or self._opened().wait())

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

    def _report(self, save: Callable[[], Saved | None]) -> None:
        try:
            saved = save()
        except SaveError as error:
            self._console.line(f"could not save: {error}", "error")
            self._journal.event("save_failed", reason=str(error))
            return
        self._tell(saved)

    def _extra(self, engine: Engine) -> dict[str, Any]:
        scale = engine.loss_scale()
        return {
            "loss_scale": None if scale is None else dataclasses.asdict(scale),
            "config": self._resolved.config.flat(),
            "steps": self._resolved.steps,
            "skipped_steps": self._skipped.total,
        }

    def _tell(self, saved: Saved | None) -> None:
        if saved is not None:
            self._saved_step = saved.step
            self._console.line(
                f"saved {saved.path} ({gib(saved.size_bytes)} in {saved.duration_s:.1f} s)"
            )
            self._journal.event(
                "saved", saved.step, path=str(saved.path), size_bytes=saved.size_bytes
            )
