"""The first example on the console, and how much of the data a run has read."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from launcher.config.schema import DataChoice
from launcher.data import Corpus, open_corpus
from launcher.run.first_example import MOST_TOKENS, first_example


def opened(folder: Path, completion: str) -> Corpus:
    line = json.dumps({"prompt": "Add 2 and 2: ", "completion": completion})
    (folder / "pairs.jsonl").write_text(f"{line}\n" * 40)
    return open_corpus(
        DataChoice(data=str(folder / "pairs.jsonl"), tokenizer="byte"),
        vocab_size=300,
        seq_len=16,
        cache_dir=folder / "cache",
    )


@pytest.mark.parametrize("terminal", [False, True])
def test_masked_tokens_are_dim_on_a_terminal_only(terminal: bool, tmp_path: Path) -> None:
    console = Console(
        force_terminal=terminal, width=200, color_system="standard" if terminal else None
    )
    with console.capture() as shown:
        for line in first_example(opened(tmp_path, "4"), "byte"):
            console.print(line, markup=False, highlight=False)
    masked = "\x1b[2mAdd 2 and 2: \x1b[0m" if terminal else "Add 2 and 2: "
    assert shown.get() == f"first example, 15 tokens, 2 learned:\n{masked}4<|endoftext|>\n"


def test_a_long_example_is_cut(tmp_path: Path) -> None:
    title, text = first_example(opened(tmp_path, "4" * 1000), "byte")
    assert str(title) == (
        f"first example, 1,014 tokens, 1,001 learned (the first {MOST_TOKENS} are shown):"
    )
    assert len(text) == MOST_TOKENS
