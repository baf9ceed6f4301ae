"""The split of each document: as its source names it, else drawn by its number."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from launcher.data.formats import Document, Form, ReadExample, documents
from launcher.data.sources import Source

SPLIT_SEED = 80_10_10
InSplits = tuple[tuple[str, ...], Document]
"""The splits that a document is written to, and the document."""


def split_of(document: int) -> str:
    """Return the split of a document by its number: one of each ten is validation, another test.

    A pure function of the number, so that a stream needs no count in advance. The first ten draw
    from their first three, so that three documents are enough for three splits.
    """
    block, position = divmod(document, 10)
    digest = hashlib.sha256(f"{SPLIT_SEED} {block}".encode()).digest()
    places = 3 if block == 0 else 10
    validation = digest[0] % places
    # another place than validation's
    test = (validation + 1 + digest[1] % (places - 1)) % places
    return {validation: "validation", test: "test"}.get(position, "train")


def read_in_splits(
    source: Source, form: Form, read_example: ReadExample | None
) -> Iterator[InSplits]:
    """Yield each document with its splits.

    Args:
        read_example: reads a record of a form other than plain text.
    """
    for splits, part in (source.parts() or {(): source}).items():
        found: Iterator[Document]
        if read_example is None:
            found = map(Document, documents(part.texts()))
        else:
            found = part.examples(form, read_example)
        for number, document in enumerate(found):
            yield splits or (split_of(number),), document
