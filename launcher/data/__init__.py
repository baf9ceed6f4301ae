"""Text -> documents -> tokens -> deterministic global batches."""

from launcher.data.batches import EvaluationBatches, GlobalBatches
from launcher.data.corpus import Corpus, open_corpus
from launcher.data.split import IGNORED_TARGET, Sequences, Split

__all__ = [
    "IGNORED_TARGET",
    "Corpus",
    "EvaluationBatches",
    "GlobalBatches",
    "Sequences",
    "Split",
    "open_corpus",
]
