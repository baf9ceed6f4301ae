"""Text -> documents -> tokens -> deterministic global batches."""

from launcher.data.batches import (
    IGNORED_TARGET,
    EvaluationBatches,
    GlobalBatches,
    Sequences,
    Split,
)
from launcher.data.corpus import Corpus, open_corpus, saved_data_choice

__all__ = [
    "IGNORED_TARGET",
    "Corpus",
    "EvaluationBatches",
    "GlobalBatches",
    "Sequences",
    "Split",
    "open_corpus",
    "saved_data_choice",
]
