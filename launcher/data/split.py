"""One row of tokens, and the windows of it that are trained on or read."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

IGNORED_TARGET = -100  # torch's cross_entropy leaves it out


class Sequences(NamedTuple):
    """Windows of a split."""

    tokens: np.ndarray
    """int64 [n, T + 1]: inputs [:, :-1], and the targets that follow them [:, 1:]."""
    targets: np.ndarray | None = None
    """int64 [n, T], -100 where one does not count; None where all of them do."""
    starts: np.ndarray | None = None
    """int64 [n, T]: the index in its window of the first token of each input's document, 0 for one
    that began before; None where attention does not stop there."""

    def all_targets(self) -> np.ndarray:
        """int64 [n, T]."""
        return self.tokens[:, 1:] if self.targets is None else self.targets

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, ...]:
        """(tokens, targets) or (tokens, targets, starts) of these inputs: int64 [n, t] each."""
        found = [self.tokens[:, :-1], self.all_targets()]
        found += [] if self.starts is None else [self.starts]
        return tuple(array[:, positions] for array in found)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Split:
    """Documents joined to one row of tokens, each ended by the end-of-text token (messages: by
    what their template ends them with).

    All arrays are read-only and mapped from disk.
    """

    tokens: np.ndarray
    """uint16, or uint32 for vocabularies above 65,536."""
    learned: np.ndarray | None = None
    """uint8 per token: whether it counts as a target; None where all of them do."""
    documents: np.ndarray | None = None
    """int64: the tokens that begin a document, where attention stays inside documents, so that
    nothing predicts them. None where it does not."""

    def window_count(self, seq_len: int) -> int:
        """Windows of seq_len + 1 tokens, seq_len apart (the last target is the next input)."""
        return max(0, (len(self.tokens) - 1) // seq_len)

    def sequence_count(self, seq_len: int) -> int:
        """Windows to train on: those in which a target counts."""
        numbers = self.sequence_numbers(seq_len)
        return self.window_count(seq_len) if numbers is None else len(numbers)

    def sequence_numbers(self, seq_len: int) -> np.ndarray | None:
        """int64: the numbers of the windows to train on; None for all of them."""
        return _sequence_numbers(self, seq_len)

    def target_counts(self, seq_len: int) -> np.ndarray | None:
        """int64: how many targets count in each window, also of a last one that is shorter; None
        where all of them do."""
        return _target_counts(self, seq_len)

    def all_target_count(self, seq_len: int) -> int:
        """How many targets count in all windows."""
        counts = self.target_counts(seq_len)
        return len(self.tokens) - 1 if counts is None else int(counts.sum())

    def sequences(self, numbers: np.ndarray, seq_len: int) -> Sequences:
        """Windows number `numbers`."""
        return self.read(numbers * seq_len, seq_len)

    def read(self, firsts: np.ndarray, seq_len: int) -> Sequences:
        """What begins at tokens number `firsts`."""
        places = firsts[:, None] + np.arange(seq_len + 1)
        tokens = self.tokens[places].astype(np.int64)
        targets, starts = None, None
        if self.documents is not None:
            number = np.searchsorted(self.documents, places[:, :-1], side="right") - 1
            starts = np.maximum(self.documents[number] - places[:, :1], 0)
        if self.learned is not None or self.documents is not None:
            targets = np.where(self._counts(places[:, 1:]), tokens[:, 1:], IGNORED_TARGET)
        return Sequences(tokens, targets, starts)

    def _counts(self, places: np.ndarray) -> np.ndarray:
        """Bool: whether the tokens at `places` count as targets."""
        counted = np.ones(places.shape, bool)
        if self.learned is not None:
            counted &= self.learned[places] != 0
        if self.documents is not None:
            following = np.searchsorted(self.documents, places)
            is_first = self.documents[np.minimum(following, len(self.documents) - 1)] == places
            counted &= ~is_first
        return counted


@functools.lru_cache(maxsize=4)  # asked for in every step
def _sequence_numbers(split: Split, seq_len: int) -> np.ndarray | None:
    counts = split.target_counts(seq_len)
    return None if counts is None else np.flatnonzero(counts[: split.window_count(seq_len)])


@functools.lru_cache(maxsize=4)
def _target_counts(split: Split, seq_len: int) -> np.ndarray | None:
    if split.learned is None and split.documents is None:
        return None
    targets = len(split.tokens) - 1
    whole, rest = divmod(targets, seq_len)
    if split.learned is None:
        parts = np.full(whole, seq_len), np.array([rest])
    else:
        end = 1 + whole * seq_len
        # Not reduceat, which first makes 8 bytes of each.
        in_whole = split.learned[1:end].reshape(whole, seq_len).sum(axis=1, dtype=np.int64)
        parts = in_whole, split.learned[end:].sum(keepdims=True, dtype=np.int64)
    counts: np.ndarray = np.concatenate(parts)[: math.ceil(targets / seq_len)]
    if split.documents is not None:
        firsts = split.documents[split.documents > 0]
        if split.learned is not None:
            firsts = firsts[split.learned[firsts] != 0]
        counts = counts - np.bincount((firsts - 1) // seq_len, minlength=len(counts))
    return counts
