"""Builds one corpus folder: split the documents, train the tokenizer, write the tokens.

Beside a split's tokens stand the places where its documents begin and, where there are prompts, a
byte for each token: whether it is to be learned.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from launcher.data.cache import Progress, Report
from launcher.data.chat import ChatTemplate
from launcher.data.examples import Document, encode, with_prompt
from launcher.data.formats import documents
from launcher.data.sources import Files, Source, form_of_source
from launcher.util.errors import UserError

if TYPE_CHECKING:
    from launcher.data.tokenizer import Encoder

SPLITS = ("train", "validation", "test")
BPE_SAMPLE_BYTES = 64_000_000
TOKENIZER_FILE = "tokenizer.json"

_META_FILE = "meta.json"
_SPLIT_SEED = 80_10_10
_BATCH_BYTES = 2_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Meta:
    """What a corpus folder holds, beside its token files."""

    documents: int
    text_bytes: int
    sample_bytes: int  # text the BPE tokenizer saw; 0 for other tokenizers
    vocab_size: int
    dtype: str
    tokens: dict[str, int]
    split_documents: dict[str, int]
    learned: dict[str, int] | None  # tokens; None where all are
    fingerprint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """What the first reading of a source found; `sample` is the training text for BPE."""

    documents: int
    text_bytes: int
    sample: list[str]
    sample_bytes: int


def split_of(document: int) -> str:
    """The split of document number `document`: one of each ten is validation, another is test.

    A pure function of the number, so that a stream needs no count in advance. The first ten draw
    from their first three, so that three documents are enough for three splits.
    """
    block, position = divmod(document, 10)
    digest = hashlib.sha256(f"{_SPLIT_SEED} {block}".encode()).digest()
    places = 3 if block == 0 else 10
    validation = digest[0] % places
    test = (validation + 1 + digest[1] % (places - 1)) % places
    return {validation: "validation", test: "test"}.get(position, "train")


def build_corpus(
    directory: Path, report: Report, *, source: Source, tokenizer: str, vocab_size: int
) -> None:
    """Fills the empty `directory` with tokens, tokenizer and meta data; reads the source twice."""
    from launcher.data.tokenizer import check_vocabulary, load_encoder, train_bpe

    # torchrun sets OMP_NUM_THREADS=1 and the other ranks wait: the builder may use every core.
    # Left set, because the library warns at each later fork when the choice is not explicit.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    train = tokenizer == "bpe"
    encoder: Encoder | None = None if train else load_encoder(tokenizer)
    if encoder is not None:
        check_vocabulary(tokenizer, encoder.vocab_size, vocab_size)
    form = form_of_source(source)
    chats = form == "messages"
    read_example = ChatTemplate.of(tokenizer, source.label).document if chats else with_prompt

    def read() -> Iterator[Document]:
        if isinstance(source, Files) and form != "text":
            return source.examples(form, read_example)
        return map(Document, documents(source.texts()))

    survey = take_survey(source.label, read(), BPE_SAMPLE_BYTES if train else 0, report)
    if encoder is None:
        size = f"{survey.sample_bytes / 1e6:.1f} MB"
        report(Progress(f"training a BPE tokenizer on {size}", 0, None))
        encoder = train_bpe(survey.sample, vocab_size)
        survey.sample.clear()
    encoder.save(directory / TOKENIZER_FILE)
    dtype = np.dtype(np.uint16 if encoder.vocab_size <= 1 << 16 else np.uint32)
    writers, fingerprint = _write_tokens(
        directory,
        read(),
        encoder,
        dtype,
        all_learned=form == "text",
        report=lambda done: report(Progress("tokenizing", done, survey.text_bytes)),
    )
    learned = {split: writer.learned for split, writer in writers.items()}
    meta = Meta(
        documents=survey.documents,
        text_bytes=survey.text_bytes,
        sample_bytes=survey.sample_bytes,
        vocab_size=encoder.vocab_size,
        dtype=dtype.name,
        tokens={split: writer.tokens for split, writer in writers.items()},
        split_documents={split: writer.documents for split, writer in writers.items()},
        learned=None if form == "text" else learned,
        fingerprint=fingerprint,
    )
    (directory / _META_FILE).write_text(json.dumps(asdict(meta), indent=1), encoding="utf-8")


def read_meta(directory: Path) -> Meta | None:
    """The meta data of a complete corpus folder; None when it is missing or damaged."""
    try:
        meta = Meta(**json.loads((directory / _META_FILE).read_text(encoding="utf-8")))
        width = np.dtype(meta.dtype).itemsize
        whole = all(
            token_file(directory, split).stat().st_size == meta.tokens[split] * width
            and documents_file(directory, split).stat().st_size == 8 * meta.split_documents[split]
            and (
                meta.learned is None
                or learned_file(directory, split).stat().st_size == meta.tokens[split]
            )
            for split in SPLITS
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return meta if whole else None


def token_file(directory: Path, split: str) -> Path:
    """The tokens of `split` inside a corpus folder."""
    return directory / f"{split}.bin"


def documents_file(directory: Path, split: str) -> Path:
    """Which of the tokens begin a document: int64."""
    return directory / f"{split}.documents.bin"


def learned_file(directory: Path, split: str) -> Path:
    """Whether a token is to be learned: uint8, one for each."""
    return directory / f"{split}.learned.bin"


def take_survey(
    label: str, documents: Iterable[Document], sample_limit_bytes: int, report: Report
) -> Survey:
    """Counts the documents and picks training text for BPE, evenly over the train split.

    A document is in the sample when its random number is below `rate`; the rate is halved when the
    sample overflows. So any length of text is sampled in one pass and bounded memory.
    """
    count = text_bytes = sample_bytes = 0
    rate = 1.0
    sample: list[tuple[float, int, str]] = []
    for number, (text, *_) in enumerate(documents):
        size = len(text.encode())
        count, text_bytes = count + 1, text_bytes + size
        report(Progress("reading", text_bytes, None))
        if split_of(number) != "train" or (draw := _draw(number)) >= rate:
            continue
        sample.append((draw, size, text))
        sample_bytes += size
        while sample_bytes > sample_limit_bytes and sample:
            rate /= 2
            sample = [entry for entry in sample if entry[0] < rate]
            sample_bytes = sum(entry[1] for entry in sample)
    if count < len(SPLITS):
        raise UserError(
            f"--data {label} has {count} documents, too few for {', '.join(SPLITS)}: "
            f"give a longer text (a few kilobytes) or at least {len(SPLITS)} documents"
        )
    return Survey(
        documents=count,
        text_bytes=text_bytes,
        sample=[text for _, _, text in sample],
        sample_bytes=sample_bytes,
    )


def _draw(document: int) -> float:
    digest = hashlib.sha256(f"sample {_SPLIT_SEED} {document}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


class _SplitWriter:
    """Writes the files of one split; `learned_file` only where not all is to be learned."""

    def __init__(self, directory: Path, split: str, *, all_learned: bool) -> None:
        self.tokens = self.documents = self.learned = 0
        self._files = [
            file(directory, split).open("wb")
            for file in (token_file, documents_file, learned_file)[: 2 if all_learned else 3]
        ]
        self._digests = [hashlib.sha256() for _ in self._files]

    def add(self, ids: np.ndarray, learned: np.ndarray | None) -> None:
        """One more document."""
        parts = [ids, np.array(self.tokens, np.int64)]
        if learned is not None:
            parts.append(learned.astype(np.uint8))
            self.learned += int(learned.sum())
        for part, file, digest in zip(parts, self._files, self._digests, strict=True):
            file.write(part.tobytes())
            digest.update(part.tobytes())
        self.tokens += len(ids)
        self.documents += 1

    def close(self) -> list[str]:
        """Hashes of the tokens and of what of them is to be learned."""
        for file in self._files:
            file.close()
        return [digest.hexdigest() for digest in self._digests[::2]]


def _write_tokens(
    directory: Path,
    documents: Iterable[Document],
    encoder: Encoder,
    dtype: np.dtype[Any],
    *,
    all_learned: bool,
    report: Callable[[int], None],
) -> tuple[dict[str, _SplitWriter], str]:
    writers = {s: _SplitWriter(directory, s, all_learned=all_learned) for s in SPLITS}
    number = done_bytes = 0
    for batch, size in _batches(documents):
        report(done_bytes)
        for ids, learned in encode(encoder, batch):
            writers[split_of(number)].add(ids.astype(dtype), learned)
            number += 1
        done_bytes += size
    content = [f"{split} {' '.join(writer.close())}" for split, writer in writers.items()]
    summary = " ".join([f"{encoder.vocab_size} {encoder.end_of_text} {dtype.name}", *content])
    return writers, hashlib.sha256(summary.encode()).hexdigest()


def _batches(documents: Iterable[Document]) -> Iterator[tuple[list[Document], int]]:
    """Groups of documents of about 2 MB, large enough to keep every core busy."""
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.text.encode())
        if size >= _BATCH_BYTES:
            yield group, size
            group, size = [], 0
    if group:
        yield group, size
