"""Prompts and completions that are messages (TRL's), and contents in parts (OpenAI's)."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_tokenizers import CHATML, chat_tokenizer
from corpora import open_text

from launcher.data import Corpus
from launcher.data.tokenizer import load_encoder
from launcher.util.errors import UserError


def turn(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


ASKED = [turn("user", "Hi!"), turn("assistant", "Hello."), turn("user", "2 and 2?")]
TURNS = {"prompt": ASKED, "completion": [turn("assistant", "Four.")]}


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    pytest.importorskip("transformers")
    return f"hf:{chat_tokenizer(tmp_path / 'chat', CHATML)}"


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def opened(data: Path | str, tokenizer: str, cache: Path) -> Corpus:
    return open_text(data, tokenizer=tokenizer, vocab_size=400, cache_dir=cache)


def first_example(corpus: Corpus, tokenizer: str) -> tuple[str, str]:
    shown = corpus.first_document
    assert shown.learned is not None
    decode = partial(load_encoder(tokenizer).decode, special=True)
    return decode(shown.tokens.tolist()), decode(shown.tokens[shown.learned > 0].tolist())


def test_only_the_completions_messages_are_learned(tmp_path: Path, tokenizer: str) -> None:
    corpus = opened(write(tmp_path / "a.jsonl", [TURNS] * 40), tokenizer, tmp_path / "cache")
    assert "(messages of a prompt and a completion): 40 documents" in corpus.description
    text, learned = first_example(corpus, tokenizer)
    whole = {"messages": [*ASKED, *TURNS["completion"]]}
    chats = opened(write(tmp_path / "b.jsonl", [whole] * 40), tokenizer, tmp_path / "cache")
    both, all_learned = first_example(chats, tokenizer)
    assert text == both
    assert learned == "Four.<|im_end|>"
    assert all_learned == "Hello.<|im_end|>Four.<|im_end|>"


def test_rows_of_a_dataset_hold_them_too(tmp_path: Path, tokenizer: str) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    pq.write_table(pa.Table.from_pylist([TURNS] * 40), tmp_path / "set" / "train.parquet")
    found = [
        opened(data, tokenizer, tmp_path / "cache")
        for data in (f"hf:{tmp_path / 'set'}", tmp_path / "set" / "train.parquet")
    ]
    assert found[0].fingerprint == found[1].fingerprint
    assert first_example(found[0], tokenizer)[1] == "Four.<|im_end|>"


def test_texts_of_a_content_are_joined(tmp_path: Path, tokenizer: str) -> None:
    parts = [{"type": "text", "text": "2 and "}, {"type": "text", "text": "2?"}]
    chat = {"messages": [turn("user", parts), turn("assistant", [parts[1]])]}
    corpus = opened(write(tmp_path / "a.jsonl", [chat] * 40), tokenizer, tmp_path / "cache")
    text, learned = first_example(corpus, tokenizer)
    assert "user\n2 and 2?<|im_end|>" in text
    assert learned == "2?<|im_end|>"


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (
            {"messages": [turn("user", [{"type": "image_url"}]), turn("assistant", "a")]},
            "line 2, message 1: its content holds 'image_url', and only text is learned",
        ),
        (
            {"messages": [turn("user", ["a"]), turn("assistant", "a")]},
            "line 2, message 1: its content holds 'a', and only text is learned",
        ),
    ],
)
def test_contents_that_are_no_text(record: Any, says: str, tmp_path: Path, tokenizer: str) -> None:
    chat = {"messages": [turn("user", "a"), turn("assistant", "b")]}
    with pytest.raises(UserError) as raised:
        opened(write(tmp_path / "a.jsonl", [chat, record]), tokenizer, tmp_path / "cache")
    assert says in str(raised.value)


def test_a_completion_that_is_no_list(tmp_path: Path, tokenizer: str) -> None:
    data = write(tmp_path / "a.jsonl", [TURNS, {**TURNS, "completion": "Four."}])
    with pytest.raises(UserError, match=r"line 2: 'completion' is 'Four\.', it must be a list of"):
        opened(data, tokenizer, tmp_path / "cache")
