"""Splits of tokens, and the sequences of each step: the same on any number of ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import numpy as np

IGNORED_TARGET = -100  # ignored by torch's cross_entropy


class Sequences(NamedTuple):
    """Windows of a split."""

    tokens: np.ndarray
    """int64 [n, T + 1]: inputs [:, :-1], and the targets that follow them [:, 1:]."""
    targets: np.ndarray | None = None
    """int64 [n, T], -100 where one does not count; None where all do."""
    starts: np.ndarray | None = None
    """int64 [n, T]: index in the window of the first token of each input's document, 0 for one that
    began before; None unless attention stays inside documents."""

    def all_targets(self) -> np.ndarray:
        """Return the targets, int64 [n, T]."""
        return self.tokens[:, 1:] if self.targets is None else self.targets

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return (tokens, targets) or (tokens, targets, starts) at `positions`, int64 [n, t]."""
        found = [self.tokens[:, :-1], self.all_targets()]
        found += [] if self.starts is None else [self.starts]
        return tuple(array[:, positions] for array in found)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Split:
    """Documents joined to one row of tokens, each closed by the end-of-text token (messages: as
    their chat template ends them).

    All arrays are read-only and mapped from disk.
    """

    tokens: np.ndarray
    """uint16, or uint32 for vocabularies above 65,536."""
    learned: np.ndarray | None = None
    """uint8 per token: whether it counts as a target; None where all do."""
    documents: np.ndarray | None = None
    """int64: indices of the tokens that begin a document, which nothing predicts; None unless
    attention stays inside documents."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a document before the first that is learned; 0 where all are."""
        learned = None if self.learned is None else self.learned > 0
        return 0 if learned is None or not learned.any() else int(learned.argmax())

    def window_count(self, seq_len: int) -> int:
        """Count windows of seq_len + 1 tokens, seq_len apart: the last target is the next input."""
        return max(0, (len(self.tokens) - 1) // seq_len)

    def sequence_count(self, seq_len: int) -> int:
        """Count the windows to train on: those in which a target counts."""
        numbers = self.sequence_numbers(seq_len)
        return self.window_count(seq_len) if numbers is None else len(numbers)

    @functools.lru_cache(maxsize=4)  # noqa: B019  # needed in every step; a process has few splits
    def sequence_numbers(self, seq_len: int) -> np.ndarray | None:
        """Return the indices of the windows to train on, int64; None for all."""
        counts = self.target_counts(seq_len)
        return None if counts is None else np.flatnonzero(counts[: self.window_count(seq_len)])

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def target_counts(self, seq_len: int) -> np.ndarray | None:
        """Return the number of counted targets per window, int64, a shorter last one included; None
        where all count."""
        if self.learned is None and self.documents is None:
            return None
        targets = len(self.tokens) - 1
        whole, rest = divmod(targets, seq_len)
        if self.learned is None:
            parts = np.full(whole, seq_len), np.array([rest])
        else:
            end = 1 + whole * seq_len
            # Not reduceat, which first converts every flag to 8 bytes.
            in_whole = self.learned[1:end].reshape(whole, seq_len).sum(axis=1, dtype=np.int64)
            parts = in_whole, self.learned[end:].sum(keepdims=True, dtype=np.int64)
        counts: np.ndarray = np.concatenate(parts)[: math.ceil(targets / seq_len)]
        if self.documents is not None:
            # target n is token n + 1, and a document's first token is no target
            firsts = self.documents[self.documents > 0]
            if self.learned is not None:
                firsts = firsts[self.learned[firsts] != 0]
            counts = counts - np.bincount((firsts - 1) // seq_len, minlength=len(counts))
        return counts

    def all_target_count(self, seq_len: int) -> int:
        """Count the targets of all windows."""
        counts = self.target_counts(seq_len)
        return len(self.tokens) - 1 if counts is None else int(counts.sum())

    def sequences(self, numbers: np.ndarray, seq_len: int) -> Sequences:
        """Return the windows with these indices."""
        return self.read(numbers * seq_len, seq_len)

    def read(self, firsts: np.ndarray, seq_len: int) -> Sequences:
        """Return the windows that begin at these tokens."""
        places = firsts[:, None] + np.arange(seq_len + 1)
        tokens = self.tokens[places].astype(np.int64)
        targets, starts = None, None
        if self.documents is not None:
            # number of the document that holds each input
            number = np.searchsorted(self.documents, places[:, :-1], side="right") - 1
            starts = np.maximum(self.documents[number] - places[:, :1], 0)
        if self.learned is not None or self.documents is not None:
            targets = np.where(self._counts(places[:, 1:]), tokens[:, 1:], IGNORED_TARGET)
        return Sequences(tokens, targets, starts)

    def _counts(self, places: np.ndarray) -> np.ndarray:
        counted = np.ones(places.shape, bool)
        if self.learned is not None:
            counted &= self.learned[places] != 0
        if self.documents is not None:
            # first document that begins at or after each token; behind the last one none does
            following = np.searchsorted(self.documents, places)
            is_first = self.documents[np.minimum(following, len(self.documents) - 1)] == places
            counted &= ~is_first
        return counted


@dataclass(frozen=True, slots=True)
class GlobalBatches:
    """Global batches of a split, each a pure function of (seed, step); a rank takes a slice.

    Each epoch visits the sequences in a new random order and drops the last partial batch. A split
    smaller than one batch is repeated within the batch.
    """

    split: Split
    _: KW_ONLY
    seq_len: int
    global_batch: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Number of full global batches in the split, at least 1."""
        return max(1, self.split.sequence_count(self.seq_len) // self.global_batch)

    def indices(self, step: int) -> np.ndarray:
        """Return the sequences of global batch `step` (from 0): indices, int64 [global_batch]."""
        epoch, position = divmod(step, self.steps_per_epoch)
        order = _permutation(self.split.sequence_count(self.seq_len), self.seed, epoch)
        numbers = self.split.sequence_numbers(self.seq_len)
        start = position * self.global_batch
        # resize repeats the order where the split is smaller than the batch
        batch = np.resize(order[start : start + self.global_batch], self.global_batch)
        return batch.astype(np.int64) if numbers is None else numbers[batch]

    def rank_slice(self, step: int, *, rank: int, world_size: int) -> Sequences:
        """Return the global_batch / world_size sequences of a rank in global batch `step`.

        Those of all ranks, in rank order, are the global batch.

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
        """Return a weight for the mean loss of each of a rank's micro-batches, such that the mean
        over all micro-batches and ranks is the mean over counted targets; () where all count.

        Every rank can compute the whole global batch, so no communication is needed.

        Args:
            step: from 0.
            mine: the rank's sequences of that step.
            micro_batch: sequences per micro-batch.
            positions: the inputs that this rank reads of each sequence; None for all.
        """
        counts = self.split.target_counts(self.seq_len)
        if counts is None:
            return ()
        # `means` counts the mean losses that are averaged: micro-batches of all ranks.
        targets, means = mine.all_targets(), self.global_batch // micro_batch
        if positions is not None:
            targets, means = targets[:, positions], means * self.seq_len // len(positions)
        counted = (targets != IGNORED_TARGET).sum(axis=1).reshape(-1, micro_batch).sum(axis=1)
        # share of the step's targets, times the number of means
        return tuple((counted * means / counts[self.indices(step)].sum()).tolist())


@dataclass(frozen=True, slots=True)
class EvaluationBatches:
    """Batches of a split, or of its first `sequences` sequences, for evaluation: each counted
    target occurs exactly once over all ranks, whatever the batch and the number of ranks.

    Yields int64 (tokens, targets), each [batch, seq_len], plus starts if attention stays inside
    documents. `len()` is the same on every rank. Padding has target -100, and a rank's last batches
    may hold nothing else, so weight losses by the number of counted targets. With `positions`, a
    rank reads only these inputs of each sequence.
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
        counts = self.split.target_counts(self.seq_len)
        if counts is not None:
            windows: Sequence[int] = np.flatnonzero(counts)[: self.sequences].tolist()
        else:
            windows = range(math.ceil((len(self.split.tokens) - 1) / self.seq_len))
        return windows[: self.sequences]


@functools.lru_cache(maxsize=1)  # the same for all steps of an epoch
def _permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    # Raw bits and a stable sort instead of Generator.permutation: NumPy guarantees the bits of
    # PCG64 in all versions, but not the Generator's results, and a resumed run may have another.
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(count)
    dtype = np.uint32 if count < 1 << 32 else np.uint64
    return np.argsort(bits, kind="stable").astype(dtype)
