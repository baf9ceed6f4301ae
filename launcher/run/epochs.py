"""Steps of `--epochs`, which only the corpus tells; imported by runs that give it."""

import math

from launcher.config.resolve import Resolved
from launcher.config.rules.compute import schedule, warmup
from launcher.config.schema import RunConfig
from launcher.data import Corpus
from launcher.util.errors import UserError


def steps_of_epochs(epochs: float, sequences: int, global_batch: int) -> int:
    """Return the optimizer steps, at least one, of `epochs` passes over `sequences`."""
    return max(1, math.ceil(epochs * sequences / global_batch))


def with_steps(resolved: Resolved, corpus: Corpus) -> RunConfig:
    """Return the config with the steps of its epochs.

    Raises:
        UserError: they are fewer than its warm-up or its decay takes.
    """
    epochs = resolved.config.loop.epochs
    assert epochs is not None
    sequences = corpus.train.sequence_count(resolved.seq_len)
    steps = steps_of_epochs(epochs, sequences, resolved.global_batch)
    found = resolved.changed(steps=steps, epochs=None)
    for sentence in (*warmup(found), *schedule(found)):
        raise UserError(sentence)
    return found.config
