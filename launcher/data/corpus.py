"""A corpus of three splits of tokens, opened from the cache or built."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from launcher.data.build import SPLITS, TOKENIZER_FILE, Meta, build_corpus, read_meta, token_file
from launcher.data.cache import build_once, default_cache_dir
from launcher.data.formats import TEXT_FIELD
from launcher.data.progress import Report
from launcher.data.sources import resolve
from launcher.data.tokenizer import check_vocabulary, tokenizer_key
from launcher.errors import UserError

_FORMAT = "1"  # part of every cache key: change it when the files or the split rule change


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Split:
    """Documents joined to one row of tokens, each ended by the end-of-text token.

    `tokens` is read-only and mapped from disk: uint16, or uint32 for vocabularies above 65,536.
    """

    tokens: np.ndarray

    def sequence_count(self, seq_len: int) -> int:
        """Windows of seq_len + 1 tokens, seq_len apart (the last target is the next input)."""
        return max(0, (len(self.tokens) - 1) // seq_len)

    def sequences(self, indices: np.ndarray, seq_len: int) -> np.ndarray:
        """Windows number `indices`: int64 [len(indices), seq_len + 1], inputs [:, :-1] and
        targets [:, 1:]."""
        windows = np.empty((len(indices), seq_len + 1), np.int64)
        for row, index in zip(windows, indices, strict=True):
            start = int(index) * seq_len
            row[:] = self.tokens[start : start + seq_len + 1]
        return windows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Corpus:
    """Three splits of tokens and the tokenizer that made them."""

    train: Split
    validation: Split
    test: Split
    vocab_size: int
    """Of the tokenizer in use: every id is below it. The model's may be larger."""
    fingerprint: str
    """Hash of the tokens: the same text and tokenizer give the same string on every machine."""
    description: str
    """One line for the log."""
    tokenizer_path: Path | None
    """tokenizer.json; None for a transformers tokenizer that has no such form."""


def open_corpus(
    *,
    data: str,
    tokenizer: str,
    vocab_size: int,
    seq_len: int,
    field: str = TEXT_FIELD,
    stream_bytes: int | None = None,
    cache_dir: Path | None = None,
    show_progress: bool = True,
) -> Corpus:
    """Opens a corpus, after building it where it is not in the cache. Every rank may call it.

    Args:
        data: `stdlib`, a .txt, .jsonl or .parquet file, a folder of them, or
            hf:NAME[:CONFIG][@SPLIT].
        tokenizer: `bpe` (trained here on the train split), `byte`, hf:NAME (a name or a local
            folder), or the path of a tokenizer.json.
        vocab_size: rows of the model's embedding; the size of a `bpe` tokenizer.
        seq_len: each split must hold at least one sequence of seq_len + 1 tokens.
        field: where the text is in .jsonl and .parquet files and in datasets.
        stream_bytes: read only so much of a dataset's text, from its beginning, as a stream.
        cache_dir: $SHARDSCALE_CACHE or the user's cache folder when None.

    Raises:
        UserError: for everything a user can repair: missing or damaged input, too little text, a
            tokenizer that does not fit the model, a missing extra or network.
    """
    source = resolve(data, field, stream_bytes)
    cache_dir = cache_dir or default_cache_dir()

    def key_now() -> str:
        parts = [_FORMAT, tokenizer_key(tokenizer, vocab_size)]
        parts.append(source.content_key(cache_dir / "hashes"))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]

    def build(path: Path, report: Report) -> None:
        build_corpus(path, report, source=source, tokenizer=tokenizer, vocab_size=vocab_size)
        if key_now() != key:  # or other tokens would be found under this key for ever
            raise UserError(f"--data {data} has changed while it was read: start again")

    key = key_now()
    directory = cache_dir / "corpora" / key
    build_once(
        directory,
        is_complete=lambda path: read_meta(path) is not None,
        build=build,
        show_progress=show_progress,
    )
    meta = read_meta(directory)
    assert meta is not None
    check_vocabulary(tokenizer, meta.vocab_size, vocab_size)
    path = directory / TOKENIZER_FILE
    return Corpus(
        **{name: _open_split(directory, name, meta, data, seq_len) for name in SPLITS},
        vocab_size=meta.vocab_size,
        fingerprint=meta.fingerprint,
        description=_describe(data, tokenizer, meta),
        tokenizer_path=path if path.exists() else None,
    )


def _open_split(directory: Path, name: str, meta: Meta, data: str, seq_len: int) -> Split:
    tokens = np.memmap(token_file(directory, name), dtype=np.dtype(meta.dtype), mode="r")
    split = Split(tokens=tokens.view(np.ndarray))  # slices of a memmap are slower
    if split.sequence_count(seq_len) < 1:
        raise UserError(
            f"the {name} split of --data {data} holds {len(tokens)} tokens, fewer than one "
            f"sequence of --seq-len {seq_len} + 1: give more text or a shorter --seq-len"
        )
    return split


def _describe(data: str, tokenizer: str, meta: Meta) -> str:
    name = f"BPE {meta.vocab_size}" if tokenizer == "bpe" else tokenizer
    # The train split is 80%: less than half of the text means that the sample was capped.
    if 0 < meta.sample_bytes < meta.text_bytes // 2:
        name += f", trained on {meta.sample_bytes / 1e6:.0f} MB of it"
    tokens = sum(meta.tokens.values())
    return (
        f"{data}: {meta.documents:,} documents, {_amount(meta.text_bytes)}B, "
        f"{_amount(tokens)} tokens ({name})"
    )


def _amount(count: int) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} "
