"""When checkpoints are written and read; how is launcher/checkpoint/'s business."""

from collections.abc import Callable
from pathlib import Path

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
        self._checkpointer: Checkpointer | None = None
        if self._loop.save_every or self._loop.stop_after or self._loop.resume:
            self._checkpointer = Checkpointer(
                folder / "checkpoints",
                keep=self._loop.keep,
                asynchronous=world.device.type == "cuda",
            )

    def resume(self, engine: Engine) -> int:
        """Fill a fresh engine from `--resume`; the step that it had reached, 0 without."""
        if self._loop.resume is None:
            return 0
        assert self._checkpointer is not None
        loaded = self._checkpointer.load(self._loop.resume, engine)
        assert loaded is not None
        for reason in loaded.passed_over:
            self._console.line(f"passed over: {reason}")
        step = loaded.checkpoint.step
        self._console.line(f"resumed from {loaded.checkpoint.path} after step {step}")
        self._journal.event("resumed", step, checkpoint=str(loaded.checkpoint.path))
        return step

    def after_step(self, step: int, engine: Engine) -> bool:
        """Save where the schedule of saves, or the end of training, says so; whether it did."""
        if self._checkpointer is None:
            return False
        self._report(self._checkpointer.poll)
        last = step in (self._loop.stop_after, self._resolved.steps)
        due = self._loop.save_every is not None and step % self._loop.save_every == 0
        if due or last:
            self.finish()
            extra = {"config": self._resolved.config.flat(), "steps": self._resolved.steps}
            checkpointer = self._checkpointer
            self._report(lambda: checkpointer.save(step, engine, extra))
        return due or last

    def finish(self) -> None:
        """Wait until everything is on disk."""
        if self._checkpointer is not None:
            self._report(self._checkpointer.wait)

    def _report(self, save: Callable[[], Saved | None]) -> None:
        try:
            saved = save()
        except SaveError as error:
            self._console.line(f"could not save: {error}")
            self._journal.event("save_failed", reason=str(error))
            return
        if saved is not None:
            self._console.line(
                f"saved {saved.path} ({gib(saved.size_bytes)} in {saved.duration_s:.1f} s)"
            )
            self._journal.event(
                "saved", saved.step, path=str(saved.path), size_bytes=saved.size_bytes
            )
