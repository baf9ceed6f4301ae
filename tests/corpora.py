"""Corpora of tests, opened as a run opens them."""

from pathlib import Path
from typing import Any

from launcher.config.schema import DataChoice
from launcher.data import Corpus, open_corpus


def open_text(
    data: Path | str,
    *,
    tokenizer: str = "byte",
    vocab_size: int = 257,
    seq_len: int = 16,
    cache_dir: Path | None = None,
    **settings: Any,
) -> Corpus:
    """The corpus of a text; `settings` are further fields of DataChoice."""
    return open_corpus(
        DataChoice(data=str(data), tokenizer=tokenizer, **settings),
        vocab_size=vocab_size,
        seq_len=seq_len,
        cache_dir=cache_dir,
        show_progress=False,
    )
