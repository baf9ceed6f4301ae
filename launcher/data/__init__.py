"""Text -> documents -> tokens -> deterministic global batches.

sources.py    which text: standard library, files and folders, Hugging Face datasets
formats.py    documents out of .txt, .jsonl and .parquet
tokenizer.py  token ids: BPE trained here, bytes, tokenizer.json, transformers
build.py      split 80/10/10, train the tokenizer, write the tokens
cache.py      built once, by one of many processes, completely or not at all
progress.py   what the user sees meanwhile
corpus.py     open_corpus: the three splits, mapped from disk
batches.py    global batches and evaluation batches
"""

from launcher.data.batches import (
    IGNORED_TARGET,
    EvaluationBatches,
    GlobalBatches,
    evaluation_batches,
)
from launcher.data.corpus import Corpus, Split, open_corpus

__all__ = [
    "IGNORED_TARGET",
    "Corpus",
    "EvaluationBatches",
    "GlobalBatches",
    "Split",
    "evaluation_batches",
    "open_corpus",
]
