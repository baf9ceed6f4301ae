"""Prompts and evaluation sequences for `infer-bench`, from the runs' validation text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from launcher.checkpoint import Checkpoint
from launcher.checkpoint.extra import saved_model
from launcher.checkpoint.pretrained.companions import choose_tokenizer
from launcher.checkpoint.store import candidates
from launcher.config.rules import default_seq_len
from launcher.config.schema import DataChoice
from launcher.config.transformers_config import require_own
from launcher.data import EvaluationBatches, open_corpus, saved_data_choice
from launcher.model.config import ModelConfig
from launcher.tools.serve.choice import InferBenchOptions
from launcher.util.errors import UserError, naming

_SHORTEST_SEQUENCE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRun:
    """A run, with its text and tokenizer as recorded in its checkpoint."""

    path: Path
    model: ModelConfig
    choice: DataChoice
    tokenizer: str

    @property
    def seq_len(self) -> int:
        """Tokens per sequence in training."""
        return min(self.choice.seq_len or default_seq_len(self.model), self.model.context)


def open_run(run: Path) -> BenchRun:
    """Read a run, or one of its checkpoints.

    Raises:
        UserError: no checkpoint, one that does not record its tokenizer and text, or one of another
            decoder than ours.
    """
    checkpoint = Checkpoint.open(candidates(run)[0])
    model, saved = saved_model(checkpoint.extra), checkpoint.extra.get("config", {})
    tokenizer = choose_tokenizer(checkpoint, None)
    if tokenizer is None or model is None:
        raise UserError(
            f"{run} has no tokenizer, so no prompt can be encoded: give a run of launcher.train"
        )
    require_own(model, f"{run}: shardscale infer-bench")
    if "data" not in saved:
        raise UserError(
            f"{run} does not record its training text, whose validation split is needed: give a "
            "run of launcher.train"
        )
    choice = saved_data_choice(saved)
    return BenchRun(path=run, model=model, choice=choice, tokenizer=tokenizer)


def text_of(
    runs: Sequence[BenchRun], options: InferBenchOptions
) -> tuple[list[list[int]], dict[str, np.ndarray]]:
    """Choose prompts and evaluation sequences, as long as the shortest of the runs' own.

    Returns:
        The prompts, and the sequences from the start of the validation split as int64 [n, T]:
        `tokens`, and `targets` where -100 is ignored.

    Raises:
        UserError: a run's text is missing or too short, or two runs have different tokenized texts.
    """
    seq_len = max(_SHORTEST_SEQUENCE, min(run.seq_len for run in runs))
    corpora = []
    for run in runs:
        with naming(f"{run.path}:"):
            corpus = open_corpus(
                # graphs have no input for the starts of documents
                replace(run.choice, tokenizer=run.tokenizer, document_attention=False),
                vocab_size=run.model.vocab_size,
                seq_len=seq_len,
            )
        corpora.append(corpus)
    for run, corpus in zip(runs, corpora, strict=True):
        if corpus.fingerprint != corpora[0].fingerprint:
            raise UserError(
                f"{run.path} has another text or tokenizer than {runs[0].path}, so they cannot be "
                "compared: run infer-bench on each alone"
            )
    split, prompt_tokens = corpora[0].validation, options.prompt_tokens
    room = len(split.tokens) - prompt_tokens
    if room < 1:
        raise UserError(
            f"--prompt-tokens {prompt_tokens}: the validation split has only {len(split.tokens)} "
            "tokens: give fewer"
        )
    firsts = np.random.default_rng(options.seed).integers(0, room, size=options.prompts)
    read = EvaluationBatches(
        split, seq_len=seq_len, batch=1, rank=0, world_size=1, sequences=options.sequences
    )
    tokens, targets = zip(*((batch[0][0], batch[1][0]) for batch in read), strict=True)
    chosen = [split.tokens[first : first + prompt_tokens].tolist() for first in firsts]
    return chosen, {"tokens": np.stack(tokens), "targets": np.stack(targets)}
