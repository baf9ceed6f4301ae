"""Validation loss and generated texts while a run trains, and what a fine-tune has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import torch

from launcher.config.resolve import Resolved
from launcher.data import Corpus
from launcher.measure.records import EvalRecord, SampleRecord
from launcher.run.evaluation import VALIDATION_SEQUENCES
from launcher.run.session import Session
from launcher.strategies.engine import Engine
from launcher.util.errors import one_line

if TYPE_CHECKING:
    from launcher.run.sampling import Samples

BEFORE_AND_AFTER_SEQUENCES: Final = 64
"""Validation sequences of a fine-tune without `--eval-every`: few, since a large model on a CPU
takes minutes for them."""


class HeldOut:
    """Evaluate and sample a run on the validation split, between its steps.

    A run that begins from given weights does so before its first step and after its last one, and
    prints both side by side: the loss, and answers to two prompts where the data has prompts.

    Args:
        measure: `evaluate` of the run's engine and ranks.
    """

    def __init__(
        self,
        resolved: Resolved,
        corpus: Corpus,
        engine: Engine,
        session: Session,
        *,
        measure: Callable[..., EvalRecord],
        device: torch.device,
    ) -> None:
        self._split = corpus.validation
        self._engine, self._session, self._measure = engine, session, measure
        self._device, self._steps = device, resolved.steps
        self._eval_every = resolved.config.loop.eval_every
        self._sample_every = resolved.config.loop.sample_every
        self._compares = resolved.config.model.init_from is not None
        self._samples: Samples | None = None
        if self._sample_every or (self._compares and _answers(resolved, corpus)):
            from launcher.run.sampling import Samples

            self._samples = Samples.of(resolved, corpus)
        self._before: tuple[EvalRecord | None, list[SampleRecord]] | None = None

    def begin(self) -> None:
        """Evaluate what a fine-tune begins from, unless it is resumed. Collective."""
        if self._session.step == 0 and self._compares:
            self._before = self._look(0)

    def after(self, step: int) -> None:
        """Evaluate and generate where this step is due. Collective."""
        now = self._look(step)
        if self._before is not None and step == self._steps:
            self._session.console.lines(list(_changes(self._before, now)))

    def _look(self, step: int) -> tuple[EvalRecord | None, list[SampleRecord]]:
        loss, texts = None, []
        if self._due(self._eval_every, step):
            loss = self._measure(
                self._split,
                name="validation",
                step=step,
                max_sequences=VALIDATION_SEQUENCES
                if self._eval_every
                else BEFORE_AND_AFTER_SEQUENCES,
            )
            self._session.evaluated(loss)
        if self._samples is not None and self._due(self._sample_every, step):
            texts = self._samples.take(self._engine, step, self._device)
            for text in texts:
                self._session.sampled(text, shown=bool(self._sample_every))
        return loss, texts

    def _due(self, every: int | None, step: int) -> bool:
        if every == 0:
            return False
        if step in (0, self._steps):
            return self._compares or every is not None
        return every is not None and step % every == 0


def _answers(resolved: Resolved, corpus: Corpus) -> bool:
    """Return whether prompts are answered without being asked for: they are not where whole
    sequences or matrices are cut, nor where a compiler would compile for it."""
    config = resolved.config
    return (
        config.loop.sample_every is None
        and any(shown.learned is not None for shown in corpus.validation_documents)
        and config.sharding.tensor_parallel == config.sharding.context_parallel == 1
        and not config.loop.compiles
    )


def _changes(
    before: tuple[EvalRecord | None, list[SampleRecord]],
    after: tuple[EvalRecord | None, list[SampleRecord]],
) -> Iterator[str]:
    loss, texts = before
    later_loss, later_texts = after
    if loss is not None and later_loss is not None:
        yield (
            f"held-out loss: {loss.loss:.4f} before, {later_loss.loss:.4f} after, over "
            f"{loss.tokens:,} tokens of the validation split"
        )
    for text, later in zip(texts, later_texts, strict=False):
        yield f"held-out prompt: {one_line(text.prompt, most=400)}"
        yield f"  before: {one_line(text.text, most=400)}"
        yield f"  after:  {one_line(later.text, most=400)}"
