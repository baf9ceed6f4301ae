"""Write a checkpoint from all ranks, atomically."""

import datetime
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from launcher.checkpoint.document import DamagedCheckpoint
from launcher.checkpoint.index import Checkpoint, Contents, RankFile
from launcher.checkpoint.rank_files import write_shards
from launcher.checkpoint.store import CheckpointFolder
from launcher.strategies.flat_shards import PARAM, Shard
from launcher.util.errors import Failure, UserError

T = TypeVar("T")
TIMEOUT = datetime.timedelta(minutes=30)
"""Limit of the ranks' waits for each other, and so of a save."""


class SaveError(Failure):
    """A checkpoint could not be written. Earlier ones are intact; training can continue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A published checkpoint."""

    step: int
    path: Path
    size_bytes: int
    duration_s: float
    """From the call of `save` to the published folder."""


class Ranks:
    """Collectives of saving and loading, on a gloo group of their own: training's is in use while a
    save runs.

    All ranks build one at the same time. Exchanged objects are pickled: they are this run's own,
    never read from a file.
    """

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self._group: dist.ProcessGroup | None = None
        if dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if self.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)

    def gather(self, value: T) -> list[T]:
        """Return all ranks' values on the main rank; an empty list elsewhere."""
        if self._group is None:
            return [value]
        everybody: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, everybody, dst=0, group=self._group)
        return everybody or []

    def broadcast(self, value: object) -> Any:
        """Return the main rank's value on all ranks."""
        message: list[Any] = [value]
        if self._group is not None:
            dist.broadcast_object_list(message, src=0, group=self._group)
        return message[0]

    def on_main(self, work: Callable[[], T]) -> T:
        """Run `work` on the main rank; its result, UserError or Failure appears on all ranks."""
        outcome: T | UserError | Failure | None = None
        if self.rank == 0:
            try:
                outcome = work()
            except (UserError, Failure) as error:
                outcome = error
        outcome = self.broadcast(outcome)
        if isinstance(outcome, UserError | Failure):
            raise outcome
        return outcome


def write_checkpoint(
    contents: Contents,
    shards: Callable[[], Iterable[Shard]],
    folder: CheckpointFolder,
    ranks: Ranks,
    *,
    keep: int | None,
    replaces: int | None,
    started_s: float,
) -> Saved:
    """Write every rank's file, then the index, then give the folder its name. Collective.

    Args:
        contents: without files, and with the generators of this rank only.
        shards: yields what this rank writes, each time it is called.
        started_s: start of the save, on the monotonic clock.

    Raises:
        SaveError: on every rank, when one rank failed; nothing is left of the attempt.
    """
    temporary = ranks.on_main(lambda: _begin(contents.step, folder))
    part = _write_part(contents.step, shards, temporary, ranks.rank)
    parts = ranks.gather((part, contents.rng[0]))
    saved = ranks.on_main(lambda: _publish(contents, temporary, folder, parts, started_s))
    if keep is not None or replaces is not None:
        ranks.on_main(lambda: _prune(saved, folder, keep, replaces))
    return saved


def _begin(step: int, folder: CheckpointFolder) -> Path:
    try:
        return folder.begin(step)
    except OSError as error:
        raise _error(step, str(error)) from None


def _write_part(
    step: int, shards: Callable[[], Iterable[Shard]], temporary: Path, rank: int
) -> RankFile | SaveError:
    path = temporary / f"rank-{rank:05d}.safetensors"
    try:
        return write_shards(path, lambda: _finite(step, shards()))
    except SaveError as error:
        return error
    except OSError as error:
        return _error(step, f"rank {rank}, {error.strerror} while writing {path}")


def _finite(step: int, shards: Iterable[Shard]) -> Iterator[Shard]:
    """Yield the shards; weights that are not finite must not take the place of good ones."""
    for shard in shards:
        # The extremes of NaN are NaN; unlike isfinite, this allocates nothing of the shard's size.
        if shard.kind == PARAM and shard.data.numel() > 0:
            lowest, highest = shard.data.aminmax()
            if not (lowest.isfinite() and highest.isfinite()):
                raise _error(step, f"{shard.name} has weights that are not finite")
        yield shard


def _publish(
    contents: Contents,
    temporary: Path,
    folder: CheckpointFolder,
    parts: Sequence[tuple[RankFile | SaveError, Mapping[str, str]]],
    started_s: float,
) -> Saved:
    step = contents.step
    try:
        for part, _ in parts:
            if isinstance(part, SaveError):
                raise part
        of_all = {"rng": [rng for _, rng in parts], "files": [part for part, _ in parts]}
        checkpoint = Checkpoint(path=temporary, **vars(contents) | of_all)
        if (missing := checkpoint.missing_state()) is not None:
            raise _error(step, f"the training state {missing}")
        checkpoint.check_coverage()
        checkpoint.check_sizes()  # the main rank may not see a file on another node's disk
        checkpoint.write()
        path = folder.publish(temporary, step)
    except (SaveError, DamagedCheckpoint, OSError) as error:
        shutil.rmtree(temporary, ignore_errors=True)  # the save's own error is reported
        raise error if isinstance(error, SaveError) else _error(step, str(error)) from None
    duration_s = time.monotonic() - started_s
    return Saved(step=step, path=path, size_bytes=checkpoint.size_bytes, duration_s=duration_s)


def _prune(saved: Saved, folder: CheckpointFolder, keep: int | None, replaces: int | None) -> None:
    try:
        if replaces is not None:
            folder.remove(replaces)
        if keep is not None:
            folder.prune(keep, step=saved.step)
    except OSError as error:
        raise SaveError(
            f"{saved.path} is saved, but older ones cannot be removed: {error}"
        ) from None


def _error(step: int, why: str) -> SaveError:
    return SaveError(f"the checkpoint of step {step} could not be saved: {why}")
