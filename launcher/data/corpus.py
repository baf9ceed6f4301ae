"""A corpus of three splits of tokens, opened from the cache or built."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from launcher.data.build import (
    SPLITS,
    TOKENIZER_FILE,
    Meta,
    build_corpus,
    documents_file,
    learned_file,
    read_meta,
    token_file,
)
from launcher.data.cache import Report, build_once, default_cache_dir
from launcher.data.chat import template_files
from launcher.data.formats import TEXT_FIELD, hash_files, hub_files, stamps
from launcher.data.hub import HUB_PREFIX
from launcher.data.sources import Source, form_of_source, resolve
from launcher.data.split import Split
from launcher.data.tokenizer import check_vocabulary, tokenizer_key
from launcher.util.errors import UserError

_FORMAT = "2"  # part of every cache key: change it when the files or the split rule change


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
    mask_prompt: bool | None = None,
    document_attention: bool = False,
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
        mask_prompt: whether prompts are no targets; None: where there are any.
        document_attention: whether attention stays inside documents.
        stream_bytes: read only so much of a dataset's text, from its beginning, as a stream.
        cache_dir: $SHARDSCALE_CACHE or the user's cache folder when None.

    Raises:
        UserError: for everything a user can repair: missing or damaged input, too little text, a
            tokenizer that does not fit the model, a missing extra or network.
    """
    source = resolve(data, field, stream_bytes)
    if mask_prompt:
        _require_prompts(source)
    directory = _built(
        source,
        tokenizer,
        vocab_size,
        cache_dir=cache_dir or default_cache_dir(),
        show_progress=show_progress,
    )
    meta = read_meta(directory)
    assert meta is not None
    check_vocabulary(tokenizer, meta.vocab_size, vocab_size)
    masked = meta.learned is not None and mask_prompt is not False
    splits = {
        name: _open_split(directory, name, meta, masked=masked, in_documents=document_attention)
        for name in SPLITS
    }
    for name, split in splits.items():
        _require_a_sequence(split, name, data, seq_len)
    path = directory / TOKENIZER_FILE
    return Corpus(
        **splits,
        vocab_size=meta.vocab_size,
        fingerprint=meta.fingerprint,
        description=_describe(data, tokenizer, meta, masked=masked),
        tokenizer_path=path if path.exists() else None,
    )


def _require_prompts(source: Source) -> None:
    if form_of_source(source) == "text":
        raise UserError(
            f"--mask-prompt: --data {source.label} has no prompts (a .jsonl file with prompt and "
            "completion, or messages): leave it out"
        )


def _built(
    source: Source, tokenizer: str, vocab_size: int, *, cache_dir: Path, show_progress: bool
) -> Path:
    """The corpus folder in the cache, built where it is not there."""

    def key_now() -> str:
        parts = [_FORMAT, tokenizer_key(tokenizer, vocab_size)]
        if form_of_source(source) == "messages":
            parts.append(hash_files(template_files(tokenizer)))
        parts.append(source.content_key(cache_dir / "hashes"))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]

    files = [*source.local_files(), *_tokenizer_files(tokenizer)]

    def build(path: Path, report: Report) -> None:
        build_corpus(path, report, source=source, tokenizer=tokenizer, vocab_size=vocab_size)
        # Other tokens would be found under this key for ever. The key alone would miss a file that
        # was replaced and then restored; stamps alone, a clock that is too coarse.
        if stamps(files) != before or key_now() != key:
            raise UserError(f"--data {source.label} has changed while it was read: start again")

    before = stamps(files)
    key = key_now()
    directory = cache_dir / "corpora" / key
    build_once(
        directory,
        is_complete=lambda path: read_meta(path) is not None,
        build=build,
        show_progress=show_progress,
    )
    return directory


def _tokenizer_files(tokenizer: str) -> list[Path]:
    if tokenizer.startswith(HUB_PREFIX):
        return hub_files(tokenizer.removeprefix(HUB_PREFIX))
    path = Path(tokenizer).expanduser()
    return [path, *template_files(tokenizer)] if path.is_file() else []


def _open_split(
    directory: Path, name: str, meta: Meta, *, masked: bool, in_documents: bool
) -> Split:
    def mapped(path: Path, dtype: str) -> np.ndarray:
        # Slices of a memmap are slower than those of a view.
        return np.memmap(path, dtype=np.dtype(dtype), mode="r").view(np.ndarray)

    return Split(
        tokens=mapped(token_file(directory, name), meta.dtype),
        learned=mapped(learned_file(directory, name), "uint8") if masked else None,
        documents=mapped(documents_file(directory, name), "int64") if in_documents else None,
    )


def _require_a_sequence(split: Split, name: str, data: str, seq_len: int) -> None:
    if split.window_count(seq_len) < 1:
        raise UserError(
            f"the {name} split of --data {data} holds {len(split.tokens)} tokens, fewer than one "
            f"sequence of --seq-len {seq_len} + 1: give more text or a shorter --seq-len"
        )
    if split.sequence_count(seq_len) < 1:
        raise UserError(
            f"the {name} split of --data {data} has no token to learn in its sequences of "
            f"--seq-len {seq_len}: give more examples, or --no-mask-prompt to learn prompts too"
        )


def _describe(data: str, tokenizer: str, meta: Meta, *, masked: bool) -> str:
    name = f"BPE {meta.vocab_size}" if tokenizer == "bpe" else tokenizer
    # The train split is 80%: less than half of the text means that the sample was capped.
    if 0 < meta.sample_bytes < meta.text_bytes // 2:
        name += f", trained on {meta.sample_bytes / 1e6:.0f} MB of it"
    tokens = sum(meta.tokens.values())
    learned = sum(meta.learned.values()) if masked and meta.learned is not None else tokens
    share = "" if learned == tokens else f", {learned / tokens:.0%} of them learned"
    return (
        f"{data}: {meta.documents:,} documents, {_amount(meta.text_bytes)}B, "
        f"{_amount(tokens)} tokens ({name}){share}"
    )


def _amount(count: int) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} "
