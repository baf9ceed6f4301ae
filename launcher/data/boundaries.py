"""Tokens at which the spans of a document that are learned begin and end.

The first learned token is the first one that encoding the text before the span does not give. Each
prefix of a long conversation would be encoded again and again, so encoding begins at the last
special token before: tokenizers cut a text there.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np

from launcher.data.formats import Document
from launcher.data.tokenizer import Encoder, FastEncoder


@dataclass(frozen=True, slots=True)
class Cuts:
    """Places of a document's text, and the parts of it that are encoded to find their tokens."""

    places: list[int]
    """The first character and the end of each learned span."""
    starts: list[int]
    """For each place, that of the last special token before, 0 without one."""

    @classmethod
    def of(cls, document: Document, special: re.Pattern[str] | None) -> Self:
        """Return those of a document."""
        places = [place for span in document.learned or () for place in span]
        # one span takes two prefixes at most, which is no reason to search
        found = special.finditer(document.text) if special and len(places) > 2 else ()
        ends, begins = [0], [0]
        for match in found:
            ends.append(match.end())
            begins.append(match.start())
        return cls(places, [begins[bisect_right(ends, place) - 1] for place in places])

    def texts(self, text: str) -> Iterator[str]:
        """Yield the parts between starts, then for each place the part before it."""
        parts = (*pairwise(self._all_starts), *zip(self.starts, self.places, strict=True))
        return (text[begin:end] for begin, end in parts)

    @property
    def _all_starts(self) -> list[int]:
        return sorted({0, *self.starts})

    def token_places(self, ids: np.ndarray, encoded: Iterator[np.ndarray]) -> list[int] | None:
        """Return how many tokens come before each place; None where this tokenizer does not cut at
        a special token.

        Args:
            ids: of the whole text.
            encoded: those of `texts`, of which all are taken.
        """
        parts = [(end, next(encoded)) for _, end in pairwise(self._all_starts)]
        before = [next(encoded) for _ in self.places]
        first = {0: 0}
        count = 0
        for end, part in parts:
            if not np.array_equal(ids[count : count + len(part)], part):
                return None
            first[end] = count = count + len(part)
        return [
            first[start] + common_length(ids[first[start] :], part)
            for start, part in zip(self.starts, before, strict=True)
        ]


def encode_learned(
    encoder: Encoder, documents: Sequence[Document]
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yield each document's token ids, and which of them are learned (bool; None: all)."""
    special = special_tokens(encoder)
    cuts = [Cuts.of(document, special) for document in documents]
    texts = [
        text
        for document, cut in zip(documents, cuts, strict=True)
        for text in (document.text, *cut.texts(document.text))
    ]
    encoded = map(np.asarray, encoder.encode(texts))
    for document, cut in zip(documents, cuts, strict=True):
        ids = next(encoded).astype(np.int64)
        places = cut.token_places(ids, encoded)
        if places is None:
            prefixes = encoder.encode([document.text[:place] for place in cut.places])
            places = [common_length(ids, np.asarray(prefix)) for prefix in prefixes]
        learned = None if document.learned is None else np.zeros(len(ids), bool)
        if learned is not None:
            # begins and ends of spans alternate
            for begin, end in zip(places[::2], places[1::2], strict=True):
                learned[begin:end] = True
        yield ids, learned


def special_tokens(encoder: Encoder) -> re.Pattern[str] | None:
    """Return a pattern of the tokens at which a tokenizer cuts texts; None if that is unknown."""
    if not isinstance(encoder, FastEncoder):
        return None
    added = encoder.tokenizer.get_added_tokens_decoder().values()
    # Numbered ones are reserved, thousands of them in Gemma's, and searching would take longer.
    texts = (t.content for t in added if t.special and not re.search("[0-9]", t.content))
    # a pattern takes the first alternative that matches, and one token may begin another
    names = sorted(map(re.escape, texts), key=len, reverse=True)
    return re.compile("|".join(names)) if names else None


def common_length(ids: np.ndarray, others: np.ndarray) -> int:
    """Count the leading tokens that two rows have in common."""
    most = min(len(ids), len(others))
    differ = np.flatnonzero(ids[:most] != others[:most])
    return int(differ[0]) if len(differ) else most
