"""What happens on every rank to get a checkpoint onto the disk, all of it or nothing."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from launcher.checkpoint.extra import Extra
from launcher.checkpoint.files import write_shards
from launcher.checkpoint.index import CHUNK_ELEMENTS, Checkpoint, DamagedCheckpoint, RankFile
from launcher.checkpoint.ranks import Ranks
from launcher.checkpoint.store import CheckpointFolder
from launcher.errors import Failure
from launcher.strategies.flat_shards import PARAM, OwnShapes, Shard

T = TypeVar("T")


class SaveError(Failure):
    """A checkpoint could not be written. Earlier ones are as they were; training can go on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint that is on disk."""

    step: int
    path: Path
    size_bytes: int
    duration_s: float
    """From the call of `save` to the published folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """One rank's part of the state at one step."""

    step: int
    shards: Iterable[Shard]
    shapes: Mapping[str, tuple[int, ...]]
    kinds: Sequence[str]
    own_shapes: OwnShapes
    counters: Mapping[str, float]
    extra: Mapping[str, Any]
    rng: Mapping[str, str]
    started_s: float
    """When `save` was called, on the monotonic clock."""


def write_checkpoint(
    snapshot: Snapshot, folder: CheckpointFolder, ranks: Ranks, *, keep: int | None
) -> Saved:
    """Write every rank's file, then the index, then give the folder its name. Collective.

    Raises:
        SaveError: on every rank, when one rank failed; nothing is left of the attempt.
    """
    begun = _begin(snapshot, folder) if ranks.is_main else None
    temporary: Path = _raised(ranks.broadcast(begun))
    part = _write_part(snapshot, temporary, ranks.rank)
    parts = ranks.gather((part, snapshot.rng))
    outcome: Saved | SaveError | None = None
    if ranks.is_main:
        try:
            outcome = _publish(snapshot, temporary, folder, parts)
        except (SaveError, DamagedCheckpoint, OSError) as error:
            folder.discard(temporary)
            outcome = error if isinstance(error, SaveError) else _error(snapshot, str(error))
        if keep is not None and isinstance(outcome, Saved):
            outcome = _prune(outcome, folder, keep)
    saved: Saved = _raised(ranks.broadcast(outcome))
    return saved


def _begin(snapshot: Snapshot, folder: CheckpointFolder) -> Path | SaveError:
    try:
        return folder.begin(snapshot.step)
    except OSError as error:
        return _error(snapshot, str(error))


def _write_part(snapshot: Snapshot, temporary: Path, rank: int) -> RankFile | SaveError:
    path = temporary / f"rank-{rank:05d}.safetensors"
    try:
        return write_shards(path, _finite(snapshot))
    except SaveError as error:
        return error
    except OSError as error:
        return _error(snapshot, f"rank {rank}, {error.strerror} while writing {path}")


def _finite(snapshot: Snapshot) -> Iterator[Shard]:
    """The shards; weights that are no numbers must not take the place of good ones."""
    for shard in snapshot.shards:
        pieces = shard.data.split(CHUNK_ELEMENTS) if shard.kind == PARAM else ()
        if not all(bool(torch.isfinite(piece).all()) for piece in pieces):
            raise _error(snapshot, f"{shard.name} has weights that are not finite")
        yield shard


def _publish(
    snapshot: Snapshot,
    temporary: Path,
    folder: CheckpointFolder,
    parts: Sequence[tuple[RankFile | SaveError, Mapping[str, str]]],
) -> Saved:
    files = [_raised(part) for part, _ in parts]
    checkpoint = Checkpoint(
        path=temporary,
        step=snapshot.step,
        world_size=len(parts),
        shapes=snapshot.shapes,
        kinds=snapshot.kinds,
        own_shapes=snapshot.own_shapes,
        counters=snapshot.counters,
        extra=cast(Extra, snapshot.extra),
        rng=[rng for _, rng in parts],
        files=files,
    )
    if (missing := checkpoint.missing_state()) is not None:
        raise _error(snapshot, f"the training state {missing}")
    checkpoint.check_coverage()
    checkpoint.check_sizes()  # a file that the main rank does not see is on another node's disk
    checkpoint.write()
    return Saved(
        step=snapshot.step,
        path=folder.publish(temporary, snapshot.step),
        size_bytes=checkpoint.size_bytes,
        duration_s=time.monotonic() - snapshot.started_s,
    )


def _prune(saved: Saved, folder: CheckpointFolder, keep: int) -> Saved | SaveError:
    try:
        folder.prune(keep, step=saved.step)
    except OSError as error:
        return SaveError(f"{saved.path} is saved, but older ones cannot be removed: {error}")
    return saved


def _error(snapshot: Snapshot, why: str) -> SaveError:
    return SaveError(f"the checkpoint of step {snapshot.step} could not be saved: {why}")


def _raised(outcome: T | SaveError) -> T:
    if isinstance(outcome, SaveError):
        raise outcome
    return outcome
