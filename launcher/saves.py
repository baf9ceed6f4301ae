"""When checkpoints are written and read; how is launcher/checkpoint/'s business."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.checkpoint import Checkpointer, Saved, SaveError
from launcher.measure.console import RunConsole
from launcher.measure.journal import Journal
from launcher.resolve import Resolved
from launcher.sizes import gib
from launcher.strategies.engine import Engine
from launcher.world import World


class Saves:
    """The checkpoints of one run, `RUN/checkpoints/step-00000100` and so on.

    A save that fails (no room on the disk) is said loudly and training goes on; the checkpoint
    before it stays. On a GPU writing goes on beside training.
    """

    def __init__(
        self, resolved: Resolved, world: World, folder: Path, journal: Journal, console: RunConsole
    ) -> None:
        self._resolved = resolved
        self._loop = resolved.config.loop
        self._journal = journal
        self._console = console
        self._folder = folder / "checkpoints"
        self._asynchronous = world.device.type == "cuda"
        self._checkpointer: Checkpointer | None = None
        self._saved_step: int | None = None

    def resume(self, engine: Engine) -> int:
        """Fill a fresh engine from `--resume`; the step that it had reached, 0 without."""
        if self._loop.resume is None:
            return 0
        loaded = self._opened().load(self._loop.resume, engine)
        assert loaded is not None
        for reason in loaded.passed_over:
            self._console.line(f"passed over: {reason}")
        step = loaded.checkpoint.step
        self._console.line(f"resumed from {loaded.checkpoint.path} after step {step}")
        self._journal.event("resumed", step, checkpoint=str(loaded.checkpoint.path))
        return step

    def after_step(self, step: int, engine: Engine) -> bool:
        """Save where the schedule of saves, or the end of training, says so; whether it did."""
        if self._checkpointer is not None:
            self._report(self._checkpointer.poll)
        every = self._loop.save_every
        last = step == self._loop.stop_after or (every and step == self._resolved.steps)
        if not last and (every is None or step % every):
            return False
        self.save(step, engine)
        return True

    def save(self, step: int, engine: Engine) -> None:
        """Save now; on a GPU writing goes on in the background."""
        self.finish()
        self._report(lambda: self._opened().save(step, engine, self._extra()))

    def save_for_good(self, step: int, engine: Engine) -> None:
        """Save what the run ends with, unless it is on disk already.

        Raises:
            SaveError: on every rank; then there is nothing to go on from.
        """
        self.finish()
        if self._saved_step != step:
            saved = self._opened().save(step, engine, self._extra()) or self._opened().wait()
            self._tell(saved)

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
            self._console.line(f"could not save: {error}")
            self._journal.event("save_failed", reason=str(error))
            return
        self._tell(saved)

    def _extra(self) -> dict[str, Any]:
        return {"config": self._resolved.config.flat(), "steps": self._resolved.steps}

    def _tell(self, saved: Saved | None) -> None:
        if saved is not None:
            self._saved_step = saved.step
            self._console.line(
                f"saved {saved.path} ({gib(saved.size_bytes)} in {saved.duration_s:.1f} s)"
            )
            self._journal.event(
                "saved", saved.step, path=str(saved.path), size_bytes=saved.size_bytes
            )
