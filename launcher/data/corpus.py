"""Open a corpus of three splits of tokens, from the cache or after building it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from launcher.config import old_names
from launcher.config.schema import DataChoice
from launcher.data.batches import Split
from launcher.data.files import (
    HUB_PREFIX,
    SPLITS,
    TOKENIZER_FILE,
    Kind,
    Meta,
    hash_files,
    hub_tokenizer_files,
    read_meta,
    split_file,
    stamps,
    template_files,
)
from launcher.data.sources import Files, Source, find_source
from launcher.data.tokenizer import check_vocabulary, tokenizer_key
from launcher.util.errors import UserError
from launcher.util.files import default_cache_dir

if TYPE_CHECKING:
    from launcher.data.cache import Report
    from launcher.data.formats import Form

_FORMAT = "3"  # part of every cache key: change it when the files or the split rule change
_CHAT_FORMAT = "2"  # the same of what is handed to chat templates
_BATCH_SIZES = {"micro_batch", "global_batch"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Corpus:
    """Three splits of tokens and the tokenizer that made them."""

    train: Split
    validation: Split
    test: Split
    vocab_size: int
    """Size of the tokenizer: every id is below it. The model's may be larger, or smaller by added
    tokens that the text does not have."""
    fingerprint: str
    """Hash of the tokens, equal on every machine for the same text and tokenizer."""
    description: str
    """One line for the log."""
    first_document: Split
    """The train split's first document, with its own mask."""
    validation_documents: list[Split]
    """The first few of the validation split."""
    tokenizer_path: Path | None
    """tokenizer.json; None for a transformers tokenizer that has no such form."""


def saved_data_choice(saved: Mapping[str, Any]) -> DataChoice:
    """Return the data settings in the flat settings of a saved run, without its batch sizes."""
    named = {name: value for name, value in saved.items() if name.startswith("data")}
    saved = {**saved, **old_names.in_file(named)}
    known = {field.name for field in fields(DataChoice)} & saved.keys()
    return DataChoice(**{name: saved[name] for name in known - _BATCH_SIZES})


def open_corpus(
    choice: DataChoice,
    *,
    vocab_size: int,
    seq_len: int,
    cache_dir: Path | None = None,
    show_progress: bool = True,
) -> Corpus:
    """Open the corpus of a run's data settings, after building it unless it is in the cache.

    Every rank may call it.

    Args:
        choice: the settings; `saved_data_choice` returns those of a saved run.
        vocab_size: rows of the model's embedding; the size of a `bpe` tokenizer.
        seq_len: each split must hold at least one sequence of seq_len + 1 tokens.
        cache_dir: $SHARDSCALE_CACHE or the user's cache folder when None.
        show_progress: report a build on stderr.

    Raises:
        UserError: missing or damaged input, too little text, a tokenizer that does not fit the
            model, a missing package or network.
    """
    data, tokenizer, mask_prompt = choice.data, choice.tokenizer, choice.mask_prompt
    source = find_source(choice)
    if mask_prompt and source.quick_form() == "text":
        raise _no_prompts(source.label)
    directory = _built(
        source,
        tokenizer,
        vocab_size,
        cache_dir=cache_dir or default_cache_dir(),
        show_progress=show_progress,
    )
    meta = read_meta(directory)
    assert meta is not None
    if mask_prompt and meta.learned is None:
        raise _no_prompts(source.label)
    check_vocabulary(tokenizer, meta.rows or meta.vocab_size, vocab_size)
    masked, in_documents = meta.learned is not None, choice.document_attention
    masked &= mask_prompt is not False
    splits = {
        name: _open_split(directory, name, meta, masked=masked, in_documents=in_documents)
        for name in SPLITS
    }
    for name, split in splits.items():
        own = meta.named_splits and not isinstance(source, Files)
        hint = ", or add @train to the name, to split that" if own else ""
        _require_a_sequence(split, name, data, seq_len, hint)
    path = directory / TOKENIZER_FILE
    return Corpus(
        **splits,
        vocab_size=meta.vocab_size,
        fingerprint=meta.fingerprint,
        description=_describe(source, tokenizer, meta, masked=masked),
        first_document=_documents(directory, "train", splits["train"], 1)[0],
        validation_documents=_documents(directory, "validation", splits["validation"], 16),
        tokenizer_path=path if path.exists() else None,
    )


def _no_prompts(label: str) -> UserError:
    return UserError(
        f"--mask-prompt: --data {label} has no prompts (JSON lines with prompt and completion, "
        "instruction and output, messages or conversations): leave it out"
    )


def _built(
    source: Source, tokenizer: str, vocab_size: int, *, cache_dir: Path, show_progress: bool
) -> Path:
    """Return the corpus folder in the cache, built if necessary."""

    def key_now() -> str:
        parts = [_FORMAT, tokenizer_key(tokenizer, vocab_size)]
        templates = template_files(tokenizer)
        # A dataset's form follows from its name, and that of parquet files from their content.
        known = source.quick_form()
        form = known or ("messages" if templates else "text")
        if known not in ("text", "completions"):
            parts.append(_CHAT_FORMAT)
        if form in ("alpaca", "sharegpt"):
            parts.append(form)
        if form not in ("text", "completions"):  # a chat template may render them
            parts.append(hash_files(templates))
        parts.append(source.content_key(cache_dir / "hashes"))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]

    files = [*source.local_files(), *_tokenizer_files(tokenizer)]

    before = stamps(files)
    key = key_now()
    directory = cache_dir / "corpora" / key
    if read_meta(directory) is not None:
        return directory
    from launcher.data.cache import build_once
    from launcher.data.corpus_build import build_corpus

    def build(path: Path, report: Report) -> None:
        build_corpus(path, report, source=source, tokenizer=tokenizer, vocab_size=vocab_size)
        # Otherwise this key would keep the tokens of another text. The key alone would miss a file
        # that was replaced and restored; stamps alone, a change within the clock's resolution.
        if stamps(files) != before or key_now() != key:
            raise UserError(f"--data {source.label} has changed while it was read: start again")

    build_once(
        directory,
        is_complete=lambda path: read_meta(path) is not None,
        build=build,
        show_progress=show_progress,
    )
    return directory


def _tokenizer_files(tokenizer: str) -> list[Path]:
    if tokenizer.startswith(HUB_PREFIX):
        return hub_tokenizer_files(tokenizer.removeprefix(HUB_PREFIX))
    path = Path(tokenizer).expanduser()
    return [path, *template_files(tokenizer)] if path.is_file() else []


def _open_split(
    directory: Path, name: str, meta: Meta, *, masked: bool, in_documents: bool
) -> Split:
    def mapped(kind: Kind, dtype: str) -> np.ndarray:
        path = split_file(directory, name, kind)
        if path.stat().st_size == 0:  # an empty file cannot be mapped
            return np.zeros(0, np.dtype(dtype))
        # Slices of a memmap are slower than those of a view.
        return np.memmap(path, dtype=np.dtype(dtype), mode="r").view(np.ndarray)

    return Split(
        tokens=mapped("tokens", meta.dtype),
        learned=mapped("learned", "uint8") if masked else None,
        documents=mapped("documents", "int64") if in_documents else None,
    )


def _require_a_sequence(split: Split, name: str, data: str, seq_len: int, hint: str) -> None:
    if split.window_count(seq_len) < 1:
        raise UserError(
            f"the {name} split of --data {data} holds {len(split.tokens)} tokens, fewer than one "
            f"sequence of --seq-len {seq_len} + 1: give more text or a shorter --seq-len{hint}"
        )
    if split.sequence_count(seq_len) < 1:
        raise UserError(
            f"the {name} split of --data {data} has no token to learn in its sequences of "
            f"--seq-len {seq_len}: give more examples, or --no-mask-prompt to learn prompts too"
            f"{hint}"
        )


def _documents(directory: Path, name: str, split: Split, most: int) -> list[Split]:
    # one more: where the last of them ends
    starts = np.fromfile(split_file(directory, name, "documents"), np.int64, count=most + 1)
    ends = [*starts[1:], len(split.tokens)]
    return [
        Split(
            tokens=split.tokens[begin:end],
            learned=None if split.learned is None else split.learned[begin:end],
        )
        for begin, end in zip(starts[:most], ends, strict=False)
    ]


def _describe(source: Source, tokenizer: str, meta: Meta, *, masked: bool) -> str:
    form = source.quick_form() or meta.form
    holds = ""
    if form != "text" or (isinstance(source, Files) and source.has_fields()):
        from launcher.data.formats import FIELDS

        holds = f" ({FIELDS[cast('Form', form)]})"
    name = f"BPE {meta.vocab_size}" if tokenizer == "bpe" else tokenizer
    # The train split is 80%: less than half of the text means that the sample was capped.
    if 0 < meta.sample_bytes < meta.text_bytes // 2:
        name += f", trained on {meta.sample_bytes / 1e6:.0f} MB of it"
    # One held-out split may serve as both.
    once = SPLITS if sum(meta.split_documents.values()) == meta.documents else SPLITS[:2]
    tokens = sum(meta.tokens[split] for split in once)
    learned = tokens
    if masked and meta.learned is not None:
        learned = sum(meta.learned[split] for split in once)
    share = "" if learned == tokens else f", {learned / tokens:.0%} of them learned"
    return (
        f"{source.label}{holds}: {meta.documents:,} documents, {_amount(meta.text_bytes)}B, "
        f"{_amount(tokens).strip()} tokens ({name}){share}"
        + (", in splits of its own" if meta.named_splits else "")
    )


def _amount(count: int) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} "
