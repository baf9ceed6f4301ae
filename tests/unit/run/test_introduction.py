"""First lines of the console: notes on what a run leaves unused."""

from pathlib import Path

import pytest

from launcher.config.schema import RunConfig
from launcher.run.notes import default_text, unused_rows


@pytest.mark.parametrize(
    ("rows", "ids"),
    [(260, 257), (151_936, 151_669), (51_200, 50_295), (50_304, 50_277), (257, 257)],
    ids=["tiny", "Qwen3", "Phi-2", "Pythia", "all"],
)
def test_a_vocabulary_that_is_filled_up_to_a_round_number_is_no_note(rows: int, ids: int) -> None:
    assert unused_rows(RunConfig(), rows, ids) == []


def test_a_larger_vocabulary_than_the_tokenizers_is_a_note() -> None:
    config = RunConfig().replace(tokenizer="byte")
    assert unused_rows(config, 4096, 257) == [
        "vocabulary: 3,839 of 4,096 rows are never used, as the tokenizer byte has 257 ids"
    ]
    given = config.replace(tokenizer="gpt2.json", init_from=Path("llama"))
    (line,) = unused_rows(given, 128_256, 50_257)
    assert line.endswith("has 50,257 ids: is it the one that these weights were trained with?")


def test_weights_that_train_on_the_default_corpus_are_a_note() -> None:
    """Who forgets --data beside --init-from would fine-tune on Python's own sources."""
    config = RunConfig().replace(init_from=Path("llama"))
    (line,) = default_text(config)
    assert "stdlib is the default of --data" in line
    assert default_text(config.replace(data="few.jsonl")) == []
    assert default_text(RunConfig()) == []
