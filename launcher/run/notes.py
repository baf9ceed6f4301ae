"""Notes among the first lines of a run's console."""

from typing import Final

from launcher.config.schema import DataChoice, RunConfig

PADDED: Final = 0.05
"""Share of a vocabulary's rows that a round number may explain."""


def default_text(config: RunConfig) -> list[str]:
    """Return a note on weights that are fine-tuned on the default of --data.

    Weights are seldom meant for that text: a forgotten --data would train on it silently.
    """
    if config.model.init_from is None or config.data.data != DataChoice().data:
        return []
    return [
        f"data: {config.data.data} is the default of --data, the source text of Python's standard "
        "library: give --data to fine-tune on another text"
    ]


def unused_rows(config: RunConfig, rows: int, ids: int) -> list[str]:
    """Return a note on a vocabulary that is larger than the tokenizer's.

    Models fill theirs up to a round number, by less than 2% in all known ones. More than that is
    memory that learns nothing, or the tokenizer of another model.
    """
    if rows - ids <= PADDED * rows:
        return []
    says = (
        f"vocabulary: {rows - ids:,} of {rows:,} rows are never used, as the tokenizer "
        f"{config.data.tokenizer} has {ids:,} ids"
    )
    if config.model.init_from is not None:
        return [f"{says}: is it the one that these weights were trained with?"]
    return [says]
