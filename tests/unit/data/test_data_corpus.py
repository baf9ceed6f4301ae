"""open_corpus with real files, real tokenizers and a real cache."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import open_text
from tokenizers import Tokenizer

from launcher.config.schema import DataChoice
from launcher.data import Corpus, corpus_build, files
from launcher.data.corpus_build import take_survey
from launcher.data.formats import Document, cut
from launcher.data.formats import documents as cut_documents
from launcher.data.sources import find_source
from launcher.data.splits import split_of
from launcher.util.errors import UserError

ROOT = Path(__file__).parents[3]
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "while",
    "ünïcödé",
    "文字",
    "rain",
    "fell",
    "over",
    "every",
    "small",
    "grey",
    "town",
]


def story(words: int, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    lines = [" ".join(rng.choice(WORDS, 12)) for _ in range(words // 12)]
    return "".join(line + (".\n\n" if i % 5 == 4 else ".\n") for i, line in enumerate(lines))


def open_small(data: Path | str, cache: Path, tokenizer: str = "byte", **other: int) -> Corpus:
    settings: dict[str, Any] = {"vocab_size": 300} | other
    return open_text(data, tokenizer=tokenizer, cache_dir=cache, **settings)


def texts_of(corpus: Corpus) -> dict[str, list[str]]:
    """The documents of each split, decoded by the corpus's own tokenizer.json."""
    assert corpus.tokenizer_path is not None
    tokenizer = Tokenizer.from_file(str(corpus.tokenizer_path))
    end = tokenizer.token_to_id("<|endoftext|>")
    found = {}
    for name in ("train", "validation", "test"):
        tokens = getattr(corpus, name).tokens
        assert tokens[-1] == end
        parts = np.split(tokens, np.flatnonzero(tokens == end) + 1)[:-1]
        found[name] = [tokenizer.decode(part[:-1].tolist()) for part in parts]
    return found


@pytest.fixture
def records(tmp_path: Path) -> list[str]:
    return [f"record {number}: {story(40, number)}" for number in range(200)]


def test_the_default_corpus_is_cold_then_warm_without_the_heavy_libraries(tmp_path: Path) -> None:
    program = (
        "import sys, json; from pathlib import Path; from launcher.data import open_corpus; "
        "from launcher.config.schema import DataChoice; "
        "c = open_corpus(DataChoice(), vocab_size=4096, seq_len=256, cache_dir=Path(sys.argv[1])); "
        "heavy = {'tokenizers', 'pyarrow', 'transformers', 'datasets', 'rich', 'torch'}; "
        "print(json.dumps([c.description, c.fingerprint, c.vocab_size, len(c.train.tokens), "
        "str(c.train.tokens.dtype), c.train.tokens.flags.writeable, "
        "sorted(heavy & set(sys.modules))]))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        for _ in range(2)
    ]
    cold, warm = (json.loads(run.stdout) for run in runs)
    assert cold[:-1] == warm[:-1]
    assert "tokenizers" in cold[-1]
    assert warm[-1] == []
    assert cold[0].startswith("stdlib: ")
    assert "(BPE 4096)" in cold[0]
    assert cold[2] == 4096
    assert cold[3] > 1_000_000
    assert cold[4] == "uint16"
    assert cold[5] is False
    assert "data: tokenizing" in runs[0].stderr
    assert "\x1b" not in runs[0].stderr
    assert runs[1].stderr == ""


def test_bpe_is_deterministic_across_processes_and_caches(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(story(20_000), encoding="utf-8")
    program = (
        "import sys; from pathlib import Path; from launcher.data import open_corpus; "
        "from launcher.config.schema import DataChoice; "
        "print(open_corpus(DataChoice(data=sys.argv[1]), vocab_size=400, seq_len=16, "
        "cache_dir=Path(sys.argv[2]), show_progress=False).fingerprint)"
    )
    prints = set()
    for number in range(3):
        paths = [str(tmp_path / "a.txt"), str(tmp_path / f"c{number}")]
        command = [sys.executable, "-c", program, *paths]
        environment = os.environ | {"PYTHONHASHSEED": str(number)}
        run = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        prints.add(run.stdout)
    assert len(prints) == 1


def test_bpe_and_bytes_give_the_text_back(tmp_path: Path, records: list[str]) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in records))
    by_byte = open_small(path, tmp_path / "cache")
    by_bpe = open_small(path, tmp_path / "cache", "bpe", vocab_size=500)
    assert texts_of(by_byte) == texts_of(by_bpe)
    assert by_byte.vocab_size == 257
    assert 257 < by_bpe.vocab_size <= 500
    assert len(by_bpe.train.tokens) < len(by_byte.train.tokens)
    joined = [text for split in texts_of(by_bpe).values() for text in split]
    assert sorted(joined) == sorted(records)


def test_txt_jsonl_and_parquet_hold_the_same_corpus(tmp_path: Path, records: list[str]) -> None:
    jsonl, parquet, folder = tmp_path / "a.jsonl", tmp_path / "a.parquet", tmp_path / "texts"
    lines = [json.dumps({"id": 1, "text": text}, ensure_ascii=False) for text in records]
    jsonl.write_text("\ufeff" + "\r\n\n".join(lines), encoding="utf-8")
    table = pa.table({"id": [1] * 201, "text": [*records, None]})
    pq.write_table(table, parquet, row_group_size=7)
    for number, text in enumerate(records):
        path = folder / f"{number // 50}" / f"{number:03}.TXT"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "notes.rst").write_text("not read")
    (folder / ".hidden.txt").write_text("not read")
    opened = [open_small(data, tmp_path / "cache") for data in (jsonl, parquet, folder)]
    assert len({corpus.fingerprint for corpus in opened}) == 1
    assert "200 documents" in opened[0].description


def test_the_split_is_80_10_10_by_document(tmp_path: Path, records: list[str]) -> None:
    counts = dict.fromkeys(("train", "validation", "test"), 0)
    for number in range(1000):
        counts[split_of(number)] += 1
    assert counts == {"train": 800, "validation": 100, "test": 100}
    assert {split_of(number) for number in range(3)} == set(counts)
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in records))
    found = texts_of(open_small(path, tmp_path / "cache"))
    assert {name: len(texts) for name, texts in found.items()} == {
        "train": 160,
        "validation": 20,
        "test": 20,
    }


@pytest.mark.parametrize(
    ("names", "held_out"),
    [
        ({"train": "train.jsonl", "validation": "valid.jsonl", "test": "test.jsonl"}, None),
        ({"train": "train/0.jsonl", "validation": "dev/0.jsonl"}, "validation"),
        ({"train": "my_train-0-of-1.jsonl", "test": "data/my_test-0-of-1.jsonl"}, "test"),
    ],
)
def test_a_folder_is_split_as_its_files_are_named(
    tmp_path: Path, records: list[str], names: dict[str, str], held_out: str | None
) -> None:
    folder = tmp_path / "data"
    texts = {"train": records[:190], "validation": records[190:197], "test": records[197:]}
    for split, name in names.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[split])
        (folder / name).write_text(lines, encoding="utf-8")
    (folder / "README.md").write_text("no text of the corpus", encoding="utf-8")
    corpus = open_small(folder, tmp_path / "cache")
    if held_out is not None:  # a single one is both
        texts = {"train": texts["train"]} | dict.fromkeys(("validation", "test"), texts[held_out])
    assert texts_of(corpus) == texts
    documents = sum(map(len, texts.values())) - (len(texts["test"]) if held_out else 0)
    tokens = sum(len(getattr(corpus, split).tokens) for split in ("train", "validation"))
    tokens += 0 if held_out else len(corpus.test.tokens)
    assert f"{documents} documents" in corpus.description
    assert f"{tokens / 1000:.1f} k tokens" in corpus.description
    assert corpus.description.endswith(", in splits of its own")
    # Renamed, it is another corpus: the cache does not confuse them.
    for number, path in enumerate(sorted(folder.rglob("*.jsonl"))):
        path.rename(folder / f"part-{number}.jsonl")
    (folder / "README.md").unlink()
    whole = open_small(folder, tmp_path / "cache")
    assert whole.fingerprint != corpus.fingerprint
    assert "splits" not in whole.description


def test_a_corpus_of_few_tokens_is_described_with_one_space(tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text('{"text": "one two three four five"}\n' * 4)
    assert re.search(r", \d+ tokens ", open_small(tmp_path / "few.jsonl", tmp_path).description)


@pytest.mark.parametrize(
    "names",
    [("train.txt", "other.txt", "test.txt"), ("train-1.txt", "train-2.txt"), ("a.txt", "dev.txt")],
)
def test_names_that_do_not_say_all_splits_leave_them_to_be_drawn(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    for number, name in enumerate(names):
        (tmp_path / name).write_text(story(2000, number), encoding="utf-8")
    corpus = open_small(tmp_path, tmp_path / ".cache")
    assert "splits" not in corpus.description
    assert min(len(split.tokens) for split in (corpus.train, corpus.validation, corpus.test)) > 500


def test_one_large_text_is_cut_into_documents_and_nothing_is_lost(tmp_path: Path) -> None:
    text = story(40_000)
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    corpus = open_small(tmp_path / "book.txt", tmp_path / "cache")
    found = texts_of(corpus)
    assert len(found["validation"]) >= 8
    assert len(found["test"]) >= 8
    pieces = [piece for split in found.values() for piece in split]
    assert sorted("".join(sorted(pieces))) == sorted(text)
    assert all(piece in text for piece in pieces)
    assert abs(len(corpus.train.tokens) / len(text.encode()) - 0.8) < 0.03


@pytest.mark.parametrize("size", [10, 100, 1000])
def test_cut_joins_back_and_keeps_the_size(size: int) -> None:
    text = story(2_000) + "x" * 777
    pieces = list(cut(text, size))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= size


def test_many_texts_stay_whole_and_blank_ones_are_dropped() -> None:
    texts = ["", " \n", *(f"{number} " + "y" * 50_000 for number in range(100))]
    assert list(cut_documents(iter(texts))) == texts[2:]


def test_a_large_text_file_is_read_in_blocks(tmp_path: Path) -> None:
    text = story(500_000)
    assert len(text) > 2 << 20
    path = tmp_path / "large.txt"
    path.write_text(text, encoding="utf-8")
    assert "".join(cut_documents(find_source(DataChoice(data=str(path))).texts())) == text


def test_the_bpe_sample_is_bounded_and_spread_over_the_text(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("".join(f'{{"text": "document {n:05}"}}\n' for n in range(5000)))
    documents = map(Document, cut_documents(find_source(DataChoice(data=str(path))).texts()))
    in_splits = (((split_of(n),), document) for n, document in enumerate(documents))
    count, text_bytes, sample = take_survey(in_splits, 7000, lambda *_: None)
    assert count == 5000
    assert text_bytes == 5000 * 14
    assert 2000 < sum(map(len, sample)) <= 7000
    numbers = np.array([int(text.split()[1]) for text in sample])
    assert all(split_of(int(number)) == "train" for number in numbers)
    assert np.histogram(numbers, bins=5, range=(0, 5000))[0].min() > 0


def test_a_capped_sample_is_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_build, "BPE_SAMPLE_BYTES", 20_000)
    (tmp_path / "a.txt").write_text(story(20_000), encoding="utf-8")
    corpus = open_small(tmp_path / "a.txt", tmp_path / "cache", "bpe", vocab_size=400)
    assert "trained on 0 MB of it" in corpus.description


def test_the_same_text_elsewhere_is_the_same_corpus_and_other_text_is_not(tmp_path: Path) -> None:
    first, second, third = (tmp_path / f"{name}.txt" for name in "abc")
    first.write_text(story(4000))
    shutil.copy(first, second)
    third.write_text(story(4000) + "more")
    opened = [open_small(path, tmp_path / "cache") for path in (first, second, third)]
    assert opened[0].fingerprint == opened[1].fingerprint != opened[2].fingerprint
    assert len([path for path in (tmp_path / "cache/corpora").iterdir() if path.is_dir()]) == 2


def test_a_long_text_is_hashed_once_and_again_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MEMO_BYTES", 1000)
    path, cache = tmp_path / "a.txt", tmp_path / "cache"
    path.write_text(story(4000))
    os.utime(path, (1_700_000_000, 1_700_000_000))
    first = open_small(path, cache)
    assert len(list((cache / "hashes").iterdir())) == 1
    assert open_small(path, cache).fingerprint == first.fingerprint
    path.write_text(story(4000, seed=1))
    assert open_small(path, cache).fingerprint != first.fingerprint
    # Just written, so its time stamp is not trusted yet.
    assert len(list((cache / "hashes").iterdir())) == 1


def test_a_cache_that_takes_no_hash_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A corpus that others have built, in a folder that is theirs to write."""
    path, cache = tmp_path / "a.txt", tmp_path / "cache"
    path.write_text(story(4000))
    os.utime(path, (1_700_000_000, 1_700_000_000))
    first = open_small(path, cache)
    monkeypatch.setattr(files, "MEMO_BYTES", 1000)
    (cache / "hashes").write_text("")  # no folder can be made, not even by root
    assert open_small(path, cache).fingerprint == first.fingerprint


def test_names_of_files_count_in_a_folder_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "dataset"
    folder.mkdir()
    for name in ("part-1.jsonl", "part-2.jsonl"):
        (folder / name).write_text(name)
    before = files.dataset_key(str(folder), tmp_path)
    (folder / "part-1.jsonl").rename(folder / "test.jsonl")
    (folder / "part-2.jsonl").rename(folder / "train.jsonl")
    assert files.dataset_key(str(folder), tmp_path) != before


def test_weights_beside_a_tokenizer_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    before = files.hub_tokenizer_key(str(tmp_path))
    (tmp_path / "model-00001-of-00002.safetensors").write_text("weights")
    (tmp_path / "pytorch_model.bin").write_text("weights")
    assert files.hub_tokenizer_key(str(tmp_path)) == before
    (tmp_path / "tokenizer.model").write_text("pieces")
    assert files.hub_tokenizer_key(str(tmp_path)) != before


def test_a_damaged_cache_is_built_again(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(story(4000))
    first = open_small(tmp_path / "a.txt", tmp_path / "cache")
    assert first.tokenizer_path is not None
    folder = first.tokenizer_path.parent
    expected = first.test.tokens.tolist()
    (folder / "test.bin").write_bytes(b"short")
    again = open_small(tmp_path / "a.txt", tmp_path / "cache")
    assert again.fingerprint == first.fingerprint
    assert again.test.tokens.tolist() == expected


def test_a_tokenizer_file_and_wide_ids(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(story(4000), encoding="utf-8")
    trained = open_small(tmp_path / "a.txt", tmp_path / "cache", "bpe", vocab_size=300)
    by_path = open_small(tmp_path / "a.txt", tmp_path / "cache", str(trained.tokenizer_path))
    assert by_path.fingerprint == trained.fingerprint
    assert trained.tokenizer_path is not None
    tokenizer = Tokenizer.from_file(str(trained.tokenizer_path))
    tokenizer.add_tokens([f"<{number}>" for number in range(70_000)])
    tokenizer.enable_truncation(4)
    tokenizer.save(str(tmp_path / "wide.json"))
    wide = open_small(
        tmp_path / "a.txt", tmp_path / "cache", str(tmp_path / "wide.json"), vocab_size=80_000
    )
    assert wide.train.tokens.dtype == np.uint32
    assert wide.vocab_size == 70_300
    assert wide.train.tokens.tolist() == trained.train.tokens.tolist()


def test_a_json_text_with_half_a_surrogate_pair_is_repaired(tmp_path: Path) -> None:
    lines = [f'{{"text": "number {n} \\ud83d and \\ud83d\\ude00"}}' for n in range(100)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    found = texts_of(open_small(tmp_path / "a.jsonl", tmp_path / "cache"))
    assert any("\ufffd and 😀" in text for text in found["test"])


def test_the_cache_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text(story(4000))
    monkeypatch.delenv("SHARDSCALE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    open_text(tmp_path / "a.txt")
    assert (tmp_path / "xdg/shardscale/corpora").is_dir()
    monkeypatch.setenv("SHARDSCALE_CACHE", str(tmp_path / "own"))
    open_text(tmp_path / "a.txt")
    assert (tmp_path / "own/corpora").is_dir()


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_text_is_in_the_field_that_is_named(tmp_path: Path, suffix: str) -> None:
    rows = [{"text": "unused", "body": f"words and {n} more words"} for n in range(150)]
    for name, keys in (("named", {"text": "text", "body": "body"}), ("usual", {"body": "text"})):
        path = tmp_path / f"{name}.{suffix}"
        renamed = [{keys[k]: row[k] for k in keys} for row in rows]
        if suffix == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in renamed))
        else:
            pq.write_table(pa.Table.from_pylist(renamed), path)
    cache, named = tmp_path / "cache", tmp_path / f"named.{suffix}"
    found = open_text(named, data_field="body", cache_dir=cache)
    usual = open_text(f"{tmp_path}/usual.{suffix}", cache_dir=cache)
    assert found.fingerprint == usual.fingerprint
    # The same file under its usual field is another corpus, not the cached one.
    assert open_text(named, cache_dir=cache).fingerprint != found.fingerprint


@pytest.mark.parametrize(
    ("data", "flags", "says"),
    [
        ("stdlib", {"data_field": "body"}, "--data-field body: --data stdlib holds no .jsonl"),
        ("a.txt", {"data_field": "body"}, "--data-field body: --data "),
    ],
)
def test_flags_that_the_data_has_no_use_for(
    data: str, flags: dict[str, Any], says: str, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("words")
    with pytest.raises(UserError, match=says):
        find_source(DataChoice(data=data if data == "stdlib" else str(tmp_path / data), **flags))
