"""Rows of local parquet files are the same examples as lines of JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_tokenizers import CHATML, chat_tokenizer
from corpora import open_text

from launcher.data.parquet import read_column
from launcher.util.errors import UserError

PAIRS = [{"prompt": f"{n} + {n} =", "completion": f" {2 * n}"} for n in range(40)]
CHATS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes"}]}
    for n in range(40)
]
# As Llama 3.1's: a message has calls where it has the field.
CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('a single call') }}{% endif %}{{ m.tool_calls[0].function | tojson }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("records", [PAIRS, CHATS], ids=["pairs", "chats"])
def test_rows_are_read_as_lines_are(records: list[dict[str, Any]], tmp_path: Path) -> None:
    tokenizer = "byte"
    if records is CHATS:
        pytest.importorskip("transformers")
        tokenizer = f"hf:{chat_tokenizer(tmp_path / 'chat', CHATML)}"
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet", row_group_size=7)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    cache = tmp_path / "cache"
    rows, lines = (
        open_text(tmp_path / name, tokenizer=tokenizer, vocab_size=400, cache_dir=cache)
        for name in ("a.parquet", "a.jsonl")
    )
    assert rows.fingerprint == lines.fingerprint
    assert np.array_equal(rows.train.learned, lines.train.learned)  # type: ignore[arg-type]
    described = [corpus.description.partition(": ")[2] for corpus in (rows, lines)]
    assert described[0] == described[1]
    (held,) = {corpus.description.partition("(")[2].partition(")")[0] for corpus in (rows, lines)}
    assert held == ("prompt and completion" if records is PAIRS else "messages")


def test_a_warm_start_does_not_load_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.Table.from_pylist(PAIRS), tmp_path / "a.parquet")
    first = open_text(tmp_path / "a.parquet", cache_dir=tmp_path / "cache", vocab_size=400)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    warm = open_text(tmp_path / "a.parquet", cache_dir=tmp_path / "cache", vocab_size=400)
    assert (warm.fingerprint, warm.description) == (first.fingerprint, first.description)


def test_a_row_of_another_form_names_its_place(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(PAIRS), tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist([{"text": "plain"}]), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"b\.parquet row 1 holds a text, and the data begins with"):
        open_text(tmp_path, cache_dir=tmp_path / ".cache", vocab_size=400)


def test_nulls_of_columns_are_no_fields_of_messages(tmp_path: Path) -> None:
    """A column of objects has the fields of all of them in each."""
    pytest.importorskip("transformers")
    tokenizer = f"hf:{chat_tokenizer(tmp_path / 'chat', CALLS)}"
    calls = [
        {"function": {"name": "weather", "arguments": {"city": "Bern"}}},
        {"function": {"name": "time", "arguments": {"zone": "CET"}}},
    ]
    chats: list[dict[str, Any]] = [
        {
            "messages": [
                {"role": "user", "content": f"{n}?"},
                {"role": "assistant", "content": "", "tool_calls": [calls[n % 2]]},
                {"role": "tool", "content": "21", "name": "weather"},
                {"role": "assistant", "content": "It is 21."},
            ]
        }
        for n in range(40)
    ]
    pq.write_table(pa.Table.from_pylist(chats), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in chats))
    null = [{"messages": [{"tool_calls": None, **m} for m in c["messages"]]} for c in chats]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(one) + "\n" for one in null))
    rows, *others = (
        open_text(tmp_path / name, tokenizer=tokenizer, vocab_size=400, cache_dir=tmp_path / "c")
        for name in ("a.parquet", "a.jsonl", "b.jsonl")
    )
    assert {other.fingerprint for other in others} == {rows.fingerprint}


def test_a_file_of_books_is_not_in_memory_at_once(tmp_path: Path) -> None:
    texts = [f"word {n} " * 1500 for n in range(9000)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "books.parquet", row_group_size=500)
    before = pa.total_allocated_bytes()
    reading = read_column(tmp_path / "books.parquet", "text")
    assert next(reading) == texts[0]
    assert pa.total_allocated_bytes() - before < sum(map(len, texts)) / 2
    assert list(reading) == texts[1:]


def test_a_file_of_messages_without_rows_is_called_empty(tmp_path: Path) -> None:
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    pq.write_table(pa.table({"messages": pa.array([], kind)}), tmp_path / "none.parquet")
    with pytest.raises(UserError, match=r"none\.parquet has 0 documents, too few for train"):
        open_text(tmp_path / "none.parquet")
