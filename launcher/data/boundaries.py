"""Tokens at which the spans of a document that are learned begin and end.

The first learned token is the first one that encoding the text before the span does not give. Each
prefix of a long conversation would be encoded again and again, so encoding begins at the last
special token before: tokenizers cut a text there.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from launcher.data.formats import Document
from launcher.data.tokenizer import Encoder, FastEncoder

Prefix = tuple[int, int]
"""Text before an end of a learned span: from the last special token before it, 0 without one."""


def encode_learned(
    encoder: Encoder, documents: Sequence[Document]
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yield each document's token ids, and which of them are learned (bool; None: all)."""
    special = special_tokens(encoder)
    prefixes = [_prefixes(document, special) for document in documents]
    texts = [
        document.text[begin:end]
        for document, own in zip(documents, prefixes, strict=True)
        for begin, end in ((0, len(document.text)), *_between(own), *own)
    ]
    encoded = map(np.asarray, encoder.encode(texts))
    for document, own in zip(documents, prefixes, strict=True):
        ids = next(encoded).astype(np.int64)
        places = _token_places(ids, own, encoded)
        if places is None:
            wholes = encoder.encode([document.text[:end] for _, end in own])
            places = [common_length(ids, np.asarray(whole)) for whole in wholes]
        learned = None if document.learned is None else np.zeros(len(ids), bool)
        if learned is not None:
            # begins and ends of spans alternate
            for begin, end in zip(places[::2], places[1::2], strict=True):
                learned[begin:end] = True
        yield ids, learned


def _prefixes(document: Document, special: re.Pattern[str] | None) -> list[Prefix]:
    """Return those of the first character and of the end of each learned span."""
    places = [place for span in document.learned or () for place in span]
    # one span takes two prefixes at most, which is no reason to search
    found = special.finditer(document.text) if special and len(places) > 2 else ()
    ends, begins = [0], [0]
    for match in found:
        ends.append(match.end())
        begins.append(match.start())
    return [(begins[bisect_right(ends, place) - 1], place) for place in places]


def _between(prefixes: list[Prefix]) -> list[tuple[int, int]]:
    """Return the parts of a text between where prefixes begin."""
    return [*pairwise(sorted({0, *(begin for begin, _ in prefixes)}))]


def _token_places(
    ids: np.ndarray, prefixes: list[Prefix], encoded: Iterator[np.ndarray]
) -> list[int] | None:
    """Return how many tokens come before the end of each prefix; None where this tokenizer does not
    cut at a special token.

    Args:
        ids: of the whole text.
        encoded: those of the parts between prefixes, then of these; all are taken.
    """
    between = [(end, next(encoded)) for _, end in _between(prefixes)]
    before = [next(encoded) for _ in prefixes]
    first = {0: 0}
    count = 0
    for end, part in between:
        if not np.array_equal(ids[count : count + len(part)], part):
            return None
        first[end] = count = count + len(part)
    return [
        first[begin] + common_length(ids[first[begin] :], part)
        for (begin, _), part in zip(prefixes, before, strict=True)
    ]


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
