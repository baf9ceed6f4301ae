"""Which sequences belong to which step: the same on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from launcher.data.corpus import Split

IGNORED_TARGET = -100  # torch's cross_entropy leaves it out


class GlobalBatches:
    """Global batch `step` is a pure function of (seed, step); a rank takes a slice of it.

    Each epoch visits its sequences in a fresh random order. What does not fill a last batch is
    left to the next epoch's order. A split smaller than one batch is repeated within the batch.
    """

    steps_per_epoch: int

    def __init__(self, split: Split, *, seq_len: int, global_batch: int, seed: int) -> None:
        self._split = split
        self._seq_len = seq_len
        self._global_batch = global_batch
        self._seed = seed
        self._count = split.sequence_count(seq_len)
        self._epoch = -1
        self._order = np.empty(0, np.int64)
        self.steps_per_epoch = max(1, self._count // global_batch)

    def indices(self, step: int) -> np.ndarray:
        """Sequence numbers of global batch `step` (from 0): int64 [global_batch]."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._order = _permutation(self._count, self._seed, epoch)
            self._epoch = epoch
        start = position * self._global_batch
        # resize repeats the order where the split is smaller than the batch
        batch = np.resize(self._order[start : start + self._global_batch], self._global_batch)
        return batch.astype(np.int64)

    def rank_slice(self, step: int, *, rank: int, world_size: int) -> np.ndarray:
        """Rank `rank`'s part of global batch `step`: int64 [global_batch/world_size, seq_len + 1].

        The ranks' parts in rank order are the global batch.

        Raises:
            ValueError: world_size does not divide the global batch.
        """
        rows, rest = divmod(self._global_batch, world_size)
        if rest:
            raise ValueError(f"{world_size} ranks do not divide a batch of {self._global_batch}")
        mine = self.indices(step)[rank * rows : (rank + 1) * rows]
        return self._split.sequences(mine, self._seq_len)


class EvaluationBatches:
    """A split, or its first `sequences` sequences; each target once over all ranks.

    What is read does not depend on the batch or the ranks; `len()` is the same on every rank.

    Yields int64 (tokens, targets), each [batch, seq_len]. Padding has target -100; a rank's last
    batches may hold nothing else, so weigh losses by the number of targets that count.
    """

    def __init__(
        self,
        split: Split,
        *,
        seq_len: int,
        batch: int,
        rank: int,
        world_size: int,
        sequences: int | None = None,
    ) -> None:
        self._tokens = split.tokens
        self._seq_len = seq_len
        self._batch = batch
        self._rank = rank
        self._world_size = world_size
        self._windows = math.ceil((len(split.tokens) - 1) / seq_len)
        if sequences is not None:
            self._windows = min(self._windows, sequences)

    def __len__(self) -> int:
        return math.ceil(self._windows / (self._batch * self._world_size))

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for number in range(len(self)):
            first = (number * self._world_size + self._rank) * self._batch
            yield self._read(first)

    def _read(self, first: int) -> tuple[np.ndarray, np.ndarray]:
        shape = (self._batch, self._seq_len)
        tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED_TARGET, np.int64)
        for row, window in enumerate(range(first, min(first + self._batch, self._windows))):
            start = window * self._seq_len
            part = self._tokens[start : start + self._seq_len + 1]
            tokens[row, : len(part) - 1] = part[:-1]
            targets[row, : len(part) - 1] = part[1:]
        return tokens, targets


def evaluation_batches(
    split: Split,
    *,
    seq_len: int,
    batch: int,
    rank: int,
    world_size: int,
    sequences: int | None = None,
) -> EvaluationBatches:
    """Batches that cover `split`, or its first `sequences`, exactly once over all ranks."""
    return EvaluationBatches(
        split,
        seq_len=seq_len,
        batch=batch,
        rank=rank,
        world_size=world_size,
        sequences=sequences,
    )


def _permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    # Raw bits and a stable sort, not Generator.permutation: NumPy keeps the bits of PCG64 the same
    # in all versions but not what Generator makes of them, and a resumed run may have another one.
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(count)
    dtype = np.uint32 if count < 1 << 32 else np.uint64
    return np.argsort(bits, kind="stable").astype(dtype)
