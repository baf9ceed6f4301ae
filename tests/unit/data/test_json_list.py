"""A JSON list is read element by element, whatever the blocks that its text comes in."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from launcher.data import json_list
from launcher.data.json_list import elements, read_elements
from launcher.data.sources import Files
from launcher.util.errors import UserError

LISTS: list[list[Any]] = [
    [],
    [None, True, -12.5e-3, 1234567, 0],
    ["é\U0001f600", 'a "quoted" \\ ]', ""],
    [{"a": [1, {"b": "]"}], "c": {}}, [], [[]], {"text": "x" * 50}],
]


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_elements_are_those_of_the_whole(
    block: int, indent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_list, "BLOCK_CHARACTERS", block)
    for content in LISTS:
        for mark, ascii_only in ((b"", True), (b"\xef\xbb\xbf", False)):
            text = json.dumps(content, indent=indent, ensure_ascii=ascii_only).encode()
            assert list(elements(io.BytesIO(mark + text + b" \n"))) == content


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1 2]", "at example 2 (',' is missing before '2')"),
        ("[1,]", "at example 2 (Expecting value"),
        ("[1", "at example 2 (',' is missing before 'the end')"),
        ('[{"a": 1}, {"b', "at example 2 (Unterminated string"),
        ("[1]]", "at example 2 (']' behind the end of the list)"),
        ("[", "at example 1 (Expecting value"),
        ('["aaaaaaaaaaaaa', "at example 1 (more than 5 characters)"),
        ("[1, \ud800]", "at example 1 ('utf-8' codec"),
    ],
)
def test_what_is_no_list_is_one_sentence(
    text: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_list, "LONGEST_CHARACTERS", 5 if "aaa" in text else 1 << 28)
    monkeypatch.setattr(json_list, "BLOCK_CHARACTERS", 8)
    with pytest.raises(UserError, match=re.escape(f"d.json is not JSON {says}")):
        list(read_elements(io.BytesIO(text.encode(errors="surrogatepass")), Path("d.json")))


def test_the_form_of_a_large_list_is_that_of_its_head(tmp_path: Path) -> None:
    """Each rank asks for it, several times, and ShareGPT's list has 670 MB."""
    path = tmp_path / "d.json"
    path.write_text(
        '[{"instruction": "a", "output": "b"},' + " " * json_list.BLOCK_CHARACTERS + "}"
    )
    assert Files(label="d", files=(path,)).form() == "alpaca"
