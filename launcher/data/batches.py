"""Which sequences belong to which step: the same on any number of ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np

from launcher.data.split import IGNORED_TARGET, Sequences, Split


@dataclass(frozen=True, slots=True)
class GlobalBatches:
    """Global batch `step` is a pure function of (seed, step); a rank takes a slice of it.

    Each epoch visits its sequences in a fresh random order. What does not fill a last batch is
    left to the next epoch's order. A split smaller than one batch is repeated within the batch.
    """

    split: Split
    _: KW_ONLY
    seq_len: int
    global_batch: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Full global batches in the split, at least 1."""
        return max(1, self.split.sequence_count(self.seq_len) // self.global_batch)

    def indices(self, step: int) -> np.ndarray:
        """Sequence numbers of global batch `step` (from 0): int64 [global_batch]."""
        epoch, position = divmod(step, self.steps_per_epoch)
        order = _permutation(self.split.sequence_count(self.seq_len), self.seed, epoch)
        numbers = self.split.sequence_numbers(self.seq_len)
        start = position * self.global_batch
        # resize repeats the order where the split is smaller than the batch
        batch = np.resize(order[start : start + self.global_batch], self.global_batch)
        return batch.astype(np.int64) if numbers is None else numbers[batch]

    def rank_slice(self, step: int, *, rank: int, world_size: int) -> Sequences:
        """Rank `rank`'s part of global batch `step`: global_batch / world_size sequences.

        The ranks' parts in rank order are the global batch.

        Raises:
            ValueError: world_size does not divide the global batch.
        """
        rows, rest = divmod(self.global_batch, world_size)
        if rest:
            raise ValueError(f"{world_size} ranks do not divide a batch of {self.global_batch}")
        mine = self.indices(step)[rank * rows : (rank + 1) * rows]
        return self.split.sequences(mine, self.seq_len)

    def weights(
        self,
        step: int,
        mine: Sequences,
        *,
        micro_batch: int,
        positions: np.ndarray | None = None,
    ) -> tuple[float, ...]:
        """What the mean loss of each of a rank's micro-batches counts for in step `step`, so that
        the mean over all micro-batches of all ranks is that over the targets that count; () where
        all of them do.

        Every rank knows the whole global batch, so nobody has to be asked.

        Args:
            step: from 0.
            mine: what the rank reads in it.
            micro_batch: sequences at a time.
            positions: of these, as of others by as many other ranks; None for all.
        """
        counts = self.split.target_counts(self.seq_len)
        if counts is None:
            return ()
        targets, means = mine.all_targets(), self.global_batch // micro_batch
        if positions is not None:
            targets, means = targets[:, positions], means * self.seq_len // len(positions)
        counted = (targets != IGNORED_TARGET).sum(axis=1).reshape(-1, micro_batch).sum(axis=1)
        return tuple((counted * means / counts[self.indices(step)].sum()).tolist())


@dataclass(frozen=True, slots=True)
class EvaluationBatches:
    """A split, or its first `sequences` sequences; each target that counts exactly once over all
    ranks.

    What is read does not depend on the batch or the ranks; `len()` is the same on every rank.

    Yields int64 (tokens, targets), each [batch, seq_len], and where attention stays inside
    documents their starts too. Padding has target -100; a rank's last batches may hold nothing
    else, so weigh losses by the number of targets that count. With `positions`, a rank reads only
    these of each sequence.
    """

    split: Split
    _: KW_ONLY
    seq_len: int
    batch: int
    rank: int
    world_size: int
    sequences: int | None = None
    positions: np.ndarray | None = None

    def __len__(self) -> int:
        return math.ceil(len(self._windows()) / (self.batch * self.world_size))

    def __iter__(self) -> Iterator[tuple[np.ndarray, ...]]:
        windows, split = self._windows(), self.split
        for number in range(len(self)):
            tokens, targets, starts = (
                np.full((self.batch, self.seq_len), padding, np.int64)
                for padding in (0, IGNORED_TARGET, 0)
            )
            first = (number * self.world_size + self.rank) * self.batch
            for row, window in enumerate(windows[first : first + self.batch]):
                start = window * self.seq_len
                length = min(self.seq_len, len(split.tokens) - 1 - start)
                found = split.read(np.array([start]), length)
                tokens[row, :length] = found.tokens[0, :-1]
                targets[row, :length] = found.all_targets()[0]
                if found.starts is not None:
                    starts[row, :length] = found.starts[0]
            arrays = [tokens, targets] if split.documents is None else [tokens, targets, starts]
            if self.positions is not None:
                arrays = [array[:, self.positions] for array in arrays]
            yield tuple(arrays)

    def _windows(self) -> Sequence[int]:
        """Those in which a target counts."""
        counts = self.split.target_counts(self.seq_len)
        if counts is not None:
            windows: Sequence[int] = np.flatnonzero(counts).tolist()
        else:
            windows = range(math.ceil((len(self.split.tokens) - 1) / self.seq_len))
        return windows[: self.sequences]


@functools.lru_cache(maxsize=1)  # all steps of an epoch ask for it
def _permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    # Raw bits and a stable sort, not Generator.permutation: NumPy keeps the bits of PCG64 the same
    # in all versions but not what Generator makes of them, and a resumed run may have another one.
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(count)
    dtype = np.uint32 if count < 1 << 32 else np.uint64
    return np.argsort(bits, kind="stable").astype(dtype)
