"""Save and load an engine's training state, whatever the strategy on either side.

Not built on torch.distributed.checkpoint: its metadata is a pickle, which can run code before any
check, and it has no checksums. Its plan of who reads what is a few comparisons of flat ranges here.
"""

import itertools
import math
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from launcher.checkpoint.document import DamagedCheckpoint
from launcher.checkpoint.extra import Extra
from launcher.checkpoint.index import Checkpoint, Contents
from launcher.checkpoint.rank_files import RangeReader
from launcher.checkpoint.rng import generator_states, restore_generators
from launcher.checkpoint.saving import Ranks, Saved, write_checkpoint
from launcher.checkpoint.staging import Staging
from launcher.checkpoint.store import CheckpointFolder, candidates
from launcher.strategies.engine import Engine
from launcher.strategies.flat_shards import MASK, PARAM, Shard, TrainingState
from launcher.util.errors import UserError


class ReadableWeights(Protocol):
    """Parameters under our names, from any kind of folder."""

    def has(self, name: str) -> bool:
        """Return whether there is such a parameter."""

    def read_into(self, shard: Shard) -> None:
        """Fill `shard.data`, of any type on any device, with its range.

        Raises:
            UserError: they are damaged.
        """


class Checkpointer:
    """Writes and reads the checkpoints of one run; collective, all ranks make the same calls.

    Args:
        folder: `checkpoints/` of the run; on a disk that all ranks see.
        keep: how many checkpoints stay; None = all.
        asynchronous: `save` copies this rank's ranges into host memory (page-locked where there is
            a GPU; kept for the next save) and returns, and a thread writes them. Otherwise `save`
            writes from the engine's memory and needs only a few MiB.
    """

    def __init__(
        self, folder: Path, *, keep: int | None = None, asynchronous: bool = False
    ) -> None:
        self.folder = CheckpointFolder(folder)
        self._keep = keep
        self._asynchronous = asynchronous
        self._ranks = Ranks()
        self._staging: Staging | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Saved] | None = None

    def save(
        self,
        step: int,
        engine: Engine,
        extra: Mapping[str, Any],
        *,
        replaces: int | None = None,
        staging_bytes: float = math.inf,
    ) -> Saved | None:
        """Save the state after optimizer step `step`; an asynchronous save returns None.

        Then `poll` or `wait` returns the result; `wait` must be called before the next save.

        Args:
            extra: JSON; the main rank's is written.
            replaces: step whose checkpoint is removed once this one is on disk.
            staging_bytes: host memory that this rank may take for an asynchronous save. Where one
                rank's state needs more, the save is synchronous.

        Raises:
            SaveError: on every rank, when one rank failed (not enough room, most often).
        """
        assert self._pending is None, "wait for the save before this one"
        started_s = time.monotonic()
        state = engine.training_state()
        contents = Contents(
            step=step,
            world_size=self._ranks.size,
            shapes=dict(state.shapes),
            kinds=list(state.kinds),
            own_shapes=state.own_shapes,
            counters=state.counters(),
            extra=cast(Extra, extra),
            rng=[generator_states()],
            files=(),
        )
        staging = self._find_staging(state, staging_bytes) if self._asynchronous else None
        staged = None if staging is None else staging.copy(state.saved())
        write = partial(
            write_checkpoint,
            contents,
            state.saved if staged is None else lambda: staged,
            self.folder,
            self._ranks,
            keep=self._keep,
            replaces=replaces,
            started_s=started_s,
        )
        if staged is None:
            return write()
        self._pending = self._writer.submit(write)
        return None

    def wait(self) -> Saved | None:
        """Wait for the asynchronous save and return its result; None without one.

        Raises:
            SaveError: it failed; on every rank.
        """
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def poll(self) -> Saved | None:
        """Return the result of the asynchronous save, or None while it runs."""
        finished = self._pending is not None and self._pending.done()
        return self.wait() if finished else None

    def load(self, source: Path, engine: Engine) -> tuple[Checkpoint, list[str]]:
        """Load a freshly built engine and the generators, each rank reading only its own ranges:
        of a checkpoint, or of the newest intact one in a run folder.

        Returns it, and why newer ones are passed over.

        Raises:
            DamagedCheckpoint: none is intact. The engine may be half filled: do not train it.
            UserError: nothing there, or it holds another model.
        """
        damages: list[str] = []
        state = engine.training_state()
        # On the main rank, so that all ranks try the same ones.
        for path in self._ranks.on_main(lambda: candidates(source)):
            checkpoint, problem = _fill(path, state)
            agreed = self._agreed(problem)
            if isinstance(agreed, DamagedCheckpoint):
                damages.append(str(agreed))
                continue
            if agreed is not None:
                raise agreed
            assert checkpoint is not None
            state.finish_load(checkpoint.counters)
            restore_generators(
                checkpoint.rng,
                rank=self._ranks.rank,
                world_size=self._ranks.size,
                step=checkpoint.step,
            )
            return checkpoint, damages
        raise DamagedCheckpoint(damages[0])

    def begin_with(self, weights: ReadableWeights, engine: Engine, *, trained: bool = True) -> None:
        """Load the parameters of a freshly built engine, each rank reading only its own ranges.

        The optimizer stays new, and adapters that are not among the weights keep their initial
        values. Without `trained`, only frozen parameters are loaded.

        Raises:
            UserError: on every rank, when one rank cannot read them.
        """
        state, problem = engine.training_state(), None
        try:
            for shard in itertools.chain(state.frozen(), state.loaded() if trained else ()):
                wanted = shard.kind in (PARAM, MASK) and shard.data.numel() > 0
                if wanted and weights.has(shard.name):
                    weights.read_into(shard)
        except UserError as error:
            problem = error
        if (agreed := self._agreed(problem)) is not None:
            raise agreed
        if trained:
            # Counters as they are; stage 3 derives the parameters that compute from the masters.
            state.finish_load(state.counters())

    def _agreed(self, problem: UserError | None) -> UserError | None:
        """Return the lowest rank's problem on every rank, if any rank has one."""
        problems = filter(None, self._ranks.gather(problem))
        agreed: UserError | None = self._ranks.broadcast(next(problems, None))
        return agreed

    def _find_staging(self, state: TrainingState, most_bytes: float) -> Staging | None:
        """Return host memory for an asynchronous save, or None if a rank has too little."""
        if self._staging is None:
            staging = Staging(state.saved())
            fits = self._ranks.gather(staging.size_bytes <= most_bytes)
            if self._ranks.broadcast(all(fits)):
                self._staging = staging
        return self._staging


def _fill(path: Path, state: TrainingState) -> tuple[Checkpoint | None, UserError | None]:
    """Read this rank's ranges; returns the error, which all ranks must agree on."""
    try:
        checkpoint = Checkpoint.open(path)
        checkpoint.check_model(state.shapes, state.kinds, list(state.counters()))
        checkpoint.check_own_shapes(state.own_shapes)
        with RangeReader(checkpoint) as reader:
            for shard in state.loaded():
                if shard.data.numel() > 0:  # none beyond the last row
                    reader.read_into(shard)
    except UserError as error:
        return None, error
    return checkpoint, None
