"""Compressed files, and .json files that hold lines, as large text collections are published."""

import gzip
import json
from pathlib import Path

import pytest
from corpora import open_text

from launcher.data import Corpus
from launcher.util.errors import UserError

TEXTS = [f"text {n} of some words that differ by {n * n}" for n in range(120)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)


def opened(data: Path, cache: Path) -> Corpus:
    return open_text(data, vocab_size=400, cache_dir=cache)


@pytest.mark.parametrize(
    ("name", "content", "plain"),
    [
        ("a.jsonl.gz", LINES, "a.jsonl"),
        ("a.json.gz", LINES, "a.jsonl"),
        ("a.json.gz", json.dumps([{"text": text} for text in TEXTS]), "a.json"),
        ("a.TXT.GZ", "\n\n".join(TEXTS), "a.txt"),
    ],
)
def test_compressed_is_the_same_corpus(name: str, content: str, plain: str, tmp_path: Path) -> None:
    (tmp_path / plain).write_text(content, encoding="utf-8")
    (tmp_path / name).write_bytes(gzip.compress(content.encode()))
    found = [opened(tmp_path / file, tmp_path / "cache") for file in (plain, name)]
    assert found[0].fingerprint == found[1].fingerprint
    assert found[0].description.partition(": ")[2] == found[1].description.partition(": ")[2]


def test_json_may_hold_lines(tmp_path: Path) -> None:
    for name in ("a.json", "a.jsonl"):
        (tmp_path / name).write_text(LINES, encoding="utf-8")
    found = {
        opened(tmp_path / name, tmp_path / "cache").fingerprint for name in ("a.json", "a.jsonl")
    }
    assert len(found) == 1


def test_shards_of_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "c4"
    folder.mkdir()
    for number in range(3):
        lines = "".join(LINES.splitlines(keepends=True)[number::3])
        (folder / f"part.0000{number}-of-3.json.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "dataset_infos.json").write_text("{}")
    assert ": 120 documents" in opened(folder, tmp_path / "cache").description


def test_a_damaged_file_is_one_sentence(tmp_path: Path) -> None:
    whole = gzip.compress(LINES.encode())
    for damaged in (whole[:-20], b"no gzip", whole[:40] + b"\0" * 40 + whole[80:]):
        (tmp_path / "a.jsonl.gz").write_bytes(damaged)
        with pytest.raises(UserError, match=r"a\.jsonl\.gz cannot be decompressed \(.+\): write"):
            opened(tmp_path / "a.jsonl.gz", tmp_path / "cache")


def test_what_else_is_compressed_is_not_read(tmp_path: Path) -> None:
    for name in ("a.parquet.gz", "a.gz", "a.csv.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b"text"))
        with pytest.raises(UserError, match=r"is not one that is read \(.+; \.gz behind all but"):
            opened(tmp_path / name, tmp_path / "cache")
