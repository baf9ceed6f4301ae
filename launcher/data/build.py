"""Builds one corpus folder: split the documents, train the tokenizer, write the tokens."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from launcher.data.progress import Progress, Report
from launcher.data.sources import Source
from launcher.errors import UserError

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
    survey = take_survey(source, BPE_SAMPLE_BYTES if train else 0, report)
    if encoder is None:
        size = f"{survey.sample_bytes / 1e6:.1f} MB"
        report(Progress(f"training a BPE tokenizer on {size}", 0, None))
        encoder = train_bpe(survey.sample, vocab_size)
        survey.sample.clear()
    encoder.save(directory / TOKENIZER_FILE)
    dtype = np.dtype(np.uint16 if encoder.vocab_size <= 1 << 16 else np.uint32)
    tokens, fingerprint = _write_tokens(directory, source, encoder, dtype, survey, report)
    meta = Meta(
        documents=survey.documents,
        text_bytes=survey.text_bytes,
        sample_bytes=survey.sample_bytes,
        vocab_size=encoder.vocab_size,
        dtype=dtype.name,
        tokens=tokens,
        fingerprint=fingerprint,
    )
    (directory / _META_FILE).write_text(json.dumps(asdict(meta), indent=1), encoding="utf-8")


def read_meta(directory: Path) -> Meta | None:
    """The meta data of a complete corpus folder; None when it is missing or damaged."""
    try:
        meta = Meta(**json.loads((directory / _META_FILE).read_text(encoding="utf-8")))
        width = np.dtype(meta.dtype).itemsize
        sizes = [token_file(directory, split).stat().st_size for split in SPLITS]
    except (OSError, ValueError, TypeError):
        return None
    return meta if sizes == [meta.tokens[split] * width for split in SPLITS] else None


def token_file(directory: Path, split: str) -> Path:
    """The tokens of `split` inside a corpus folder."""
    return directory / f"{split}.bin"


def take_survey(source: Source, sample_limit_bytes: int, report: Report) -> Survey:
    """Counts the documents and picks training text for BPE, evenly over the train split.

    A document is in the sample when its random number is below `rate`; the rate is halved when the
    sample overflows. So any length of text is sampled in one pass and bounded memory.
    """
    count = text_bytes = sample_bytes = 0
    rate = 1.0
    sample: list[tuple[float, int, str]] = []
    for number, text in enumerate(source.documents()):
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
            f"--data {source.label} has {count} documents, too few for {', '.join(SPLITS)}: "
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


def _write_tokens(
    directory: Path,
    source: Source,
    encoder: Encoder,
    dtype: np.dtype[Any],
    survey: Survey,
    report: Report,
) -> tuple[dict[str, int], str]:
    files: dict[str, IO[bytes]] = {
        split: token_file(directory, split).open("wb") for split in SPLITS
    }
    digests = {split: hashlib.sha256() for split in SPLITS}
    tokens = dict.fromkeys(SPLITS, 0)
    number = done_bytes = 0
    end = np.array([encoder.end_of_text], dtype)
    for texts, size in _batches(source.documents()):
        report(Progress("tokenizing", done_bytes, survey.text_bytes))
        for ids in encoder.encode(texts):
            split = split_of(number)
            data = np.concatenate([np.asarray(ids, dtype), end]).tobytes()
            files[split].write(data)
            digests[split].update(data)
            tokens[split] += len(ids) + 1
            number += 1
        done_bytes += size
    for file in files.values():
        file.close()
    content = [f"{split} {digests[split].hexdigest()}" for split in SPLITS]
    summary = " ".join([f"{encoder.vocab_size} {encoder.end_of_text} {dtype.name}", *content])
    return tokens, hashlib.sha256(summary.encode()).hexdigest()


def _batches(documents: Iterable[str]) -> Iterator[tuple[list[str], int]]:
    """Groups of documents of about 2 MB, large enough to keep every core busy."""
    texts: list[str] = []
    size = 0
    for text in documents:
        texts.append(text)
        size += len(text.encode())
        if size >= _BATCH_BYTES:
            yield texts, size
            texts, size = [], 0
    if texts:
        yield texts, size
