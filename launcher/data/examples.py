"""Lines of a .jsonl file: a text, a prompt with its completion, or messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np

from launcher.data.formats import TEXT_FIELD, read_records, string_of
from launcher.util.errors import UserError

if TYPE_CHECKING:
    from launcher.data.tokenizer import Encoder

Form = Literal["text", "completions", "messages"]

_FIELDS: Final[dict[Form, str]] = {
    "text": "a text",
    "completions": "prompt and completion",
    "messages": "messages",
}


class Document(NamedTuple):
    """A text, and what of it is to be learned where that is not all of it."""

    text: str
    learned: tuple[tuple[int, int], ...] | None = None
    """From which character to which; None for all of a plain text."""
    ends_itself: bool = False
    """Whether the text says where it ends: the end-of-text token is not added."""


def form_of(record: Any) -> Form:
    """The form of a line; one that has no form's fields counts as a text without its own."""
    fields = record.keys() if isinstance(record, dict) else ()
    if TEXT_FIELD in fields:
        return "text"
    if "messages" in fields:
        return "messages"
    return "completions" if "prompt" in fields or "completion" in fields else "text"


def form_of_file(path: Path) -> Form:
    """The form of a file's first line."""
    return next((form_of(record) for _, record in read_records(path)), "text")


ReadExample = Callable[[dict[str, Any], str], Document]
"""From a record and where it stands, which a UserError names, to what is learned of it."""


def read_examples(path: Path, form: Form, read: ReadExample) -> Iterator[Document]:
    """Yields the lines of a file.

    Raises:
        UserError: a line is not of that form, or is one that `read` refuses.
    """
    for where, record in read_records(path):
        if form_of(record) != form:
            raise UserError(
                f"{where} holds {_FIELDS[form_of(record)]}, and the data begins with "
                f"{_FIELDS[form]}: write all lines in one form"
            )
        yield read(record, where)


def with_prompt(record: dict[str, Any], where: str) -> Document:
    """A prompt, which may be empty, and its completion.

    Raises:
        UserError: one of them is missing or no string, or the completion is empty.
    """
    prompt, completion = (string_of(record, field, where) for field in ("prompt", "completion"))
    if not completion or completion.isspace():
        raise UserError(
            f"{where}: its completion is empty, so there is nothing to learn: write one, or remove "
            "the line"
        )
    text = prompt + completion
    return Document(text, ((len(prompt), len(text)),))


def encode(
    encoder: Encoder, documents: Sequence[Document]
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yields each document's token ids, and which of them are to be learned (bool; None: all).

    A token belongs to what comes before a place when it is the same without what follows: so the
    first token to be learned is the first that the prompt alone would not have given.
    """
    prefixes = [
        [document.text[:place] for span in document.learned or () for place in span]
        for document in documents
    ]
    texts = [
        text
        for document, rest in zip(documents, prefixes, strict=True)
        for text in (document.text, *rest)
    ]
    encoded = map(np.asarray, encoder.encode(texts))
    for document, rest in zip(documents, prefixes, strict=True):
        ids = next(encoded).astype(np.int64)
        places = [_same(ids, next(encoded)) for _ in rest]
        learned = None if document.learned is None else np.zeros(len(ids), bool)
        if learned is not None:
            for begin, end in zip(places[::2], places[1::2], strict=True):
                learned[begin:end] = True
        if not document.ends_itself:
            ids = np.append(ids, encoder.end_of_text)
            learned = None if learned is None else np.append(learned, True)
        yield ids, learned


def _same(ids: np.ndarray, others: np.ndarray) -> int:
    """How many tokens two rows have in common at their beginning."""
    most = min(len(ids), len(others))
    differ = np.flatnonzero(ids[:most] != others[:most])
    return int(differ[0]) if len(differ) else most
