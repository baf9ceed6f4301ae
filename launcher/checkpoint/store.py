"""A run's folder of checkpoints: listing, atomic publishing and pruning."""

import re
import secrets
import shutil
from pathlib import Path

from launcher.checkpoint.document import INDEX_NAME
from launcher.util.errors import UserError
from launcher.util.files import sync

_NAME = re.compile(r"step-\d{8,}")
_LATEST = "latest"
_UNFINISHED = (".saving-*", ".deleting-*", f".{_LATEST}-*")


class CheckpointFolder:
    """`checkpoints/` of one run. A step's folder appears and disappears atomically."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def list(self) -> list[Path]:
        """Return the published checkpoints, oldest step first; complete unless damaged later."""
        try:
            entries = list(self.path.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted((entry for entry in entries if _NAME.fullmatch(entry.name)), key=_step)

    def latest(self) -> Path | None:
        """Return the checkpoint of the highest step."""
        return next(reversed(self.list()), None)

    def begin(self, step: int) -> Path:
        """Make an empty folder to write into, whose name is no checkpoint's.

        Removes remains of interrupted saves.

        Raises:
            OSError: cannot be made.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for pattern in _UNFINISHED:
            for leftover in self.path.glob(pattern):
                if leftover.is_dir():
                    # On NFS a file that a reader has open cannot be removed yet.
                    shutil.rmtree(leftover, ignore_errors=True)
                else:
                    leftover.unlink()
        # A name of its own: ranks of an earlier attempt may still be writing into theirs.
        temporary = self.path / f".saving-{_step_name(step)}-{secrets.token_hex(4)}"
        temporary.mkdir()
        return temporary

    def publish(self, temporary: Path, step: int) -> Path:
        """Give a written folder its name, durably, and point `latest` to it.

        Raises:
            OSError: the file system refuses.
        """
        final = self.path / _step_name(step)
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        # Written before the folder gets its name: nothing may need disk space after that.
        pointer = self.path / f".{_LATEST}-{secrets.token_hex(4)}"
        pointer.write_text(final.name + "\n", encoding="utf-8")
        # Only a run that was resumed earlier and reached the same step again has one.
        replaced = self._set_aside(final) if final.exists() else None
        try:
            temporary.rename(final)
        except OSError:
            if replaced is not None:
                replaced.rename(final)
            raise
        pointer.replace(self.path / _LATEST)
        sync(self.path)
        if replaced is not None:
            # After the renames: removing a large one takes minutes, in which the run may be killed.
            shutil.rmtree(replaced, ignore_errors=True)  # the next save removes what is left
        return final

    def prune(self, keep: int, *, step: int) -> None:
        """Remove all but the `keep` newest checkpoints up to `step`; `keep` is at least 1.

        Later ones stay: the run was resumed from an earlier checkpoint.
        """
        past = [path for path in self.list() if _step(path) <= step]
        for old in past[:-keep]:
            self._remove(old)

    def remove(self, step: int) -> None:
        """Remove a step's checkpoint, if it is there."""
        if (path := self.path / _step_name(step)).exists():
            self._remove(path)

    def _remove(self, path: Path) -> None:
        # Renamed first, so that an interrupted removal leaves nothing that looks complete.
        shutil.rmtree(self._set_aside(path), ignore_errors=True)  # the next save removes the rest

    def _set_aside(self, path: Path) -> Path:
        """Rename a checkpoint to a name that only waits for its removal."""
        return path.rename(path.with_name(f".deleting-{path.name}-{secrets.token_hex(4)}"))


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _step_name(step: int) -> str:
    return f"step-{step:08d}"


def candidates(source: Path) -> list[Path]:
    """Return the checkpoints of `source`, newest first.

    Args:
        source: one checkpoint, a run folder, or a run's folder of checkpoints.

    Raises:
        UserError: there is none.
    """
    try:
        if (source / INDEX_NAME).exists() or _NAME.fullmatch(source.name):
            return [source]
        for folder in (source / "checkpoints", source):
            if found := CheckpointFolder(folder).list():
                return found[::-1]
        what = "holds no checkpoint" if source.exists() else "does not exist"
    except OSError as error:  # a loop of links, or no permission
        what = f"cannot be read ({error.strerror})"
    raise UserError(
        f"{source}: {what}; give a checkpoint's folder (.../checkpoints/step-00000100) "
        "or a run folder that has one"
    )
