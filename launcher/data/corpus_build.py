"""Build a corpus folder: split the documents, train the tokenizer, write the tokens."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from launcher.data.cache import Report
from launcher.data.conversations import example_reader
from launcher.data.files import (
    HUB_PREFIX,
    META_FILE,
    SPLITS,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    Meta,
    end_token_beside,
    split_file,
)
from launcher.data.formats import Document
from launcher.data.hub import save_beside
from launcher.data.sources import Source
from launcher.data.splits import SPLIT_SEED, InSplits, read_in_splits
from launcher.data.tokenizer import (
    Encoder,
    FastEncoder,
    check_vocabulary,
    load_encoder,
    train_bpe,
)
from launcher.util.errors import UserError

BPE_SAMPLE_BYTES = 64_000_000

# of text that the tokenizer encodes at once
_BATCH_BYTES = 2_000_000


def build_corpus(
    directory: Path, report: Report, *, source: Source, tokenizer: str, vocab_size: int
) -> None:
    """Fill the empty `directory` with tokens, tokenizer and description; reads the source twice."""
    # torchrun sets OMP_NUM_THREADS=1 and the other ranks wait: the builder may use every core.
    # Left set, because the library warns at each later fork when the choice is not explicit.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    train = tokenizer == "bpe"
    encoder: Encoder | None = None if train else load_encoder(tokenizer)
    if encoder is not None:
        # before minutes of reading; the ids that the text has are checked at its end
        check_vocabulary(tokenizer, encoder.rows, vocab_size)
    form = source.form()
    read_example = None if form == "text" else example_reader(form, tokenizer, source.label)
    read = partial(read_in_splits, source, form, read_example)
    count, text_bytes, sample = take_survey(read(), BPE_SAMPLE_BYTES if train else 0, report)
    sample_bytes = sum(len(text.encode()) for text in sample)
    named = bool(source.parts())
    if not named:
        _require_three(source.label, count)
    if encoder is None:
        size = f"{sample_bytes / 1e6:.1f} MB"
        report(f"training a BPE tokenizer on {size}", 0, None)
        encoder = train_bpe(sample, vocab_size)
        sample.clear()  # up to 64 MB, of no use from here on
    encoder.save(directory / TOKENIZER_FILE)
    _keep_beside(tokenizer, encoder, directory)
    # ids are below the vocabulary's size
    dtype = np.dtype(np.uint16 if encoder.vocab_size <= 1 << 16 else np.uint32)
    writers, fingerprint = _write_tokens(
        directory,
        read(),
        encoder,
        dtype,
        all_learned=form == "text",
        report=lambda done: report("tokenizing", done, text_bytes),
    )
    learned = {split: writer.learned for split, writer in writers.items()}
    highest = max(writer.highest for writer in writers.values())
    check_vocabulary(tokenizer, highest + 1, vocab_size)
    meta = Meta(
        documents=count,
        text_bytes=text_bytes,
        sample_bytes=sample_bytes,
        vocab_size=encoder.vocab_size,
        dtype=dtype.name,
        tokens={split: writer.tokens for split, writer in writers.items()},
        split_documents={split: writer.documents for split, writer in writers.items()},
        learned=None if form == "text" else learned,
        fingerprint=fingerprint,
        form=form,
        named_splits=named,
        rows=max(encoder.rows, highest + 1),
    )
    (directory / META_FILE).write_text(json.dumps(asdict(meta), indent=1), encoding="utf-8")


def _require_three(label: str, count: int) -> None:
    if count < len(SPLITS):
        raise UserError(
            f"--data {label} has {count} documents, too few for {', '.join(SPLITS)}: "
            f"give a longer text (a few kilobytes) or at least {len(SPLITS)} documents"
        )


def _keep_beside(tokenizer: str, encoder: Encoder, directory: Path) -> None:
    """Write what a tokenizer.json alone does not say: the template of `hf:NAME`, the end token."""
    if tokenizer.startswith(HUB_PREFIX):
        save_beside(tokenizer, directory)
    elif isinstance(encoder, FastEncoder) and end_token_beside(tokenizer) is not None:
        named = {"eos_token": encoder.tokenizer.id_to_token(encoder.end_of_text)}
        (directory / TOKENIZER_CONFIG_FILE).write_text(json.dumps(named), encoding="utf-8")


def take_survey(
    documents: Iterable[InSplits], sample_limit_bytes: int, report: Report
) -> tuple[int, int, list[str]]:
    """Return the number of documents, their bytes, and training text for BPE, evenly over the train
    split.

    A document is sampled when its random number is below `rate`, which is halved whenever the
    sample overflows. So a text of any length is sampled in one pass and bounded memory.
    """
    count = text_bytes = sample_bytes = 0
    rate = 1.0
    sample: list[tuple[float, int, str]] = []
    for number, (splits, (text, *_)) in enumerate(documents):
        size = len(text.encode())
        count, text_bytes = count + 1, text_bytes + size
        report("reading", text_bytes, None)
        if "train" not in splits or (draw := _draw(number)) >= rate:
            continue
        sample.append((draw, size, text))
        sample_bytes += size
        while sample_bytes > sample_limit_bytes and sample:
            rate /= 2
            sample = [entry for entry in sample if entry[0] < rate]
            sample_bytes = sum(entry[1] for entry in sample)
    return count, text_bytes, [text for _, _, text in sample]


def _draw(document: int) -> float:
    digest = hashlib.sha256(f"sample {SPLIT_SEED} {document}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


class _SplitWriter:
    """Writes the files of one split; that of the learned tokens only if not all are."""

    def __init__(self, directory: Path, split: str, *, all_learned: bool) -> None:
        self.tokens = self.documents = self.learned = self.highest = 0
        self._files = [
            split_file(directory, split, "tokens").open("wb"),
            split_file(directory, split, "documents").open("wb"),
        ]
        if not all_learned:
            self._files.append(split_file(directory, split, "learned").open("wb"))
        self._digests = [hashlib.sha256() for _ in self._files]

    def add(self, ids: np.ndarray, learned: np.ndarray | None) -> None:
        """Append a document."""
        parts = [ids, np.array(self.tokens, np.int64)]
        if learned is not None:
            parts.append(learned.astype(np.uint8))
            self.learned += int(learned.sum())
        for part, file, digest in zip(parts, self._files, self._digests, strict=True):
            file.write(part.tobytes())
            digest.update(part.tobytes())
        self.highest = max(self.highest, int(ids.max(initial=0)))
        self.tokens += len(ids)
        self.documents += 1

    def close(self) -> list[str]:
        """Return the hashes of the tokens and of the flags of the learned ones."""
        for file in self._files:
            file.close()
        return [digest.hexdigest() for digest in self._digests[::2]]  # not of the documents' places


def _write_tokens(
    directory: Path,
    documents: Iterable[InSplits],
    encoder: Encoder,
    dtype: np.dtype[Any],
    *,
    all_learned: bool,
    report: Callable[[int], None],
) -> tuple[dict[str, _SplitWriter], str]:
    writers = {s: _SplitWriter(directory, s, all_learned=all_learned) for s in SPLITS}
    done_bytes = 0
    for batch, size in _batches(documents):
        report(done_bytes)
        encoded = encode(encoder, [document for _, document in batch])
        for (splits, _), (ids, learned) in zip(batch, encoded, strict=True):
            for split in splits:
                writers[split].add(ids.astype(dtype), learned)
        done_bytes += size
    content = [f"{split} {' '.join(writer.close())}" for split, writer in writers.items()]
    summary = " ".join([f"{encoder.vocab_size} {encoder.end_of_text} {dtype.name}", *content])
    return writers, hashlib.sha256(summary.encode()).hexdigest()


def encode(
    encoder: Encoder, documents: Sequence[Document]
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yield each document's token ids, and which of them are learned (bool; None: all)."""
    if any(document.learned is not None for document in documents):
        from launcher.data.boundaries import encode_learned  # which plain texts do without

        encoded = encode_learned(encoder, documents)
    else:
        texts = [document.text for document in documents]
        encoded = ((np.asarray(ids, np.int64), None) for ids in encoder.encode(texts))
    first = np.asarray(first_tokens(encoder), np.int64)
    for document, (ids, learned) in zip(documents, encoded, strict=True):
        if document.ends_itself:
            yield ids, learned
            continue
        begun = ids[: len(first)].tolist() == first.tolist()
        added = first[:0] if begun else first
        ends = np.concatenate([added, ids, [encoder.end_of_text]])
        if learned is not None:
            learned = np.concatenate([np.zeros(len(added), bool), learned, [True]])
        yield ends, learned


def first_tokens(encoder: Encoder) -> list[int]:
    """Return the tokens that the tokenizer begins a text with, as Llama's and Gemma's do: models
    have never seen a text without them, and are prompted with them."""
    plain, whole = list(encoder.encode(["a"])[0]), encoder.encode_prompt("a")
    places = (n for n in range(len(whole)) if whole[n : n + len(plain)] == plain)
    return whole[: next(places, 0)]


def _batches(documents: Iterable[InSplits]) -> Iterator[tuple[list[InSplits], int]]:
    """Group documents by about 2 MB, enough to keep every core busy; yields also the bytes."""
    group: list[InSplits] = []
    size = 0
    for splits, document in documents:
        group.append((splits, document))
        size += len(document.text.encode())
        if size >= _BATCH_BYTES:
            yield group, size
            group, size = [], 0
    if group:
        yield group, size
