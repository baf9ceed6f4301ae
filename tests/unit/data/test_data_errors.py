"""Every mistake a user can make with data is one sentence that names the value and the fix."""

import errno
import gzip
import json
import os
import socket
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import open_text
from tokenizers import Tokenizer, models

from launcher.data import corpus_build
from launcher.data.files import walk
from launcher.data.tokenizer import train_bpe
from launcher.util.errors import UserError
from launcher.util.packages import how_to_install

TEXT = "\n\n".join(f"Paragraph {number} says very little about anything." for number in range(500))


def refusal(
    data: Path | str, *, tokenizer: str = "byte", vocab_size: int = 257, seq_len: int = 16
) -> str:
    """The message that opening this corpus is refused with."""
    with pytest.raises(UserError) as caught:
        open_text(data, tokenizer=tokenizer, vocab_size=vocab_size, seq_len=seq_len)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDSCALE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def book(tmp_path: Path) -> Path:
    (tmp_path / "book.txt").write_text(TEXT)
    return tmp_path / "book.txt"


def test_missing_file(tmp_path: Path) -> None:
    message = refusal(tmp_path / "nowhere.txt")
    assert f"{tmp_path}/nowhere.txt does not exist" in message
    assert "stdlib" in message


def test_unsupported_suffix(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("a,b")
    message = refusal(tmp_path / "table.csv")
    assert "'.csv'" in message
    assert ".txt, .md, .jsonl, .json, .parquet" in message


def test_folder_without_text(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "picture.png").write_bytes(b"\x89PNG")
    assert "folder holds no text: no .txt, .md, .jsonl, .parquet" in refusal(tmp_path / "folder")


def test_an_object_in_a_json_file_is_asked_for_as_lines_or_a_list(tmp_path: Path) -> None:
    (tmp_path / "all.json").write_text('{\n "data": []\n}')
    message = refusal(tmp_path / "all.json")
    assert message.endswith("write one JSON object per line, or one list as .json")


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(TEXT.encode() + "né".encode("latin-1"))
    message = refusal(tmp_path / "latin.txt")
    assert "latin.txt is not UTF-8 (byte 0xe9)" in message
    assert "iconv" in message


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"text": "a"', "line 3 is not JSON (Expecting ',' delimiter at column 13)"),
        (b'{"text": "\xe9"}', "line 3 is not UTF-8"),
        (b'["text"]', "line 3 is a JSON list, not an object"),
        (b'{"body": "a", "id": 1}', "line 3 has no field 'text' (fields: body, id)"),
        (b'{"text": 17}', "line 3: 'text' is 17, it must be a string"),
    ],
)
def test_bad_jsonl_line(tmp_path: Path, line: bytes, expected: str) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"text": "first"}\n\n' + line + b'\n{"text": "last"}\n')
    assert f"{path} {expected}" in refusal(path)


def test_parquet_without_a_text_column(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"content": ["a"], "id": [1]}), path)
    message = refusal(path)
    assert f"{path} has no column 'text' (columns: content, id)" in message
    assert "--data-field" in message


def test_parquet_with_numbers_as_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "table.parquet")
    assert "table.parquet: column 'text' holds int64" in refusal(tmp_path / "table.parquet")


@pytest.mark.parametrize("damage", ["truncated", "overwritten", "not parquet"])
def test_damaged_parquet(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "table.parquet"
    texts = [f"{number} {TEXT[:200]}" for number in range(500)]
    pq.write_table(pa.table({"text": texts}), path, compression="zstd")
    content = path.read_bytes()
    damaged = {
        "truncated": content[:-100],
        "overwritten": content[:30] + b"\0" * 2000 + content[2030:],
        "not parquet": b"hello",
    }
    path.write_bytes(damaged[damage])
    assert f"{path} cannot be read as parquet" in refusal(path)


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"text": ["a"]}), path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # import raises ImportError
    assert f"{path} is a parquet file" in (message := refusal(path))
    assert how_to_install("hf") in message


@pytest.mark.parametrize("content", ["", " \n\n\t", "one short line"])
def test_text_too_short_for_three_documents(tmp_path: Path, content: str) -> None:
    (tmp_path / "tiny.txt").write_text(content)
    message = refusal(tmp_path / "tiny.txt")
    assert f"tiny.txt has {1 if content.strip() else 0} documents, too few" in message


def test_split_shorter_than_a_sequence(book: Path) -> None:
    message = refusal(book, seq_len=8192)
    assert "the validation split" in message
    assert "--seq-len 8192 + 1" in message
    assert "shorter --seq-len" in message


def test_byte_tokenizer_beyond_the_vocabulary(book: Path) -> None:
    message = refusal(book, vocab_size=256)
    assert "token id 256 is beyond the vocabulary of 256" in message
    assert "257 or more" in message


def test_warm_corpus_beyond_the_vocabulary(book: Path) -> None:
    open_text(book)
    assert "token id 256 is beyond the vocabulary of 100" in refusal(book, vocab_size=100)


def test_an_added_token_beyond_the_vocabulary_is_an_error_where_text_has_it(
    book: Path, tmp_path: Path
) -> None:
    """Gemma 3 1B's own tokenizer has one token more, for images, than its model has rows."""
    path = tmp_path / "tokenizer.json"
    train_bpe([TEXT], 270).save(path)
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["<image_soft_token>"])
    assert tokenizer.token_to_id("<image_soft_token>") == 270
    tokenizer.save(str(path))
    open_text(book, tokenizer=str(path), vocab_size=270)
    assert "token id 269 is beyond" in refusal(book, tokenizer=str(path), vocab_size=269)
    book.write_text(f"{TEXT}\n\n<image_soft_token> here", encoding="utf-8")
    for _ in range(2):  # when it is tokenized, and from the cache
        assert "token id 270 is beyond" in refusal(book, tokenizer=str(path), vocab_size=270)
        open_text(book, tokenizer=str(path), vocab_size=271)


def test_bpe_vocabulary_smaller_than_the_bytes(book: Path) -> None:
    message = refusal(book, tokenizer="bpe", vocab_size=256)
    assert "a vocabulary of 256 is too small" in message
    assert "257" in message


def test_unknown_tokenizer(book: Path) -> None:
    message = refusal(book, tokenizer="gpt2")
    assert "no tokenizer 'gpt2'" in message
    assert "hf:NAME" in message


def test_tokenizer_file_that_is_not_one(book: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    message = refusal(book, tokenizer=str(tmp_path / "tokenizer.json"))
    assert f"{tmp_path}/tokenizer.json cannot be read as a tokenizer.json" in message


def test_tokenizer_without_an_end(book: Path, tmp_path: Path) -> None:
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "endless.json"))
    message = refusal(book, tokenizer=str(tmp_path / "endless.json"))
    assert "endless.json has no token that ends a text" in message
    assert "<|endoftext|>" in message


def test_cache_folder_that_cannot_be_made(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDSCALE_CACHE", str(book))  # a file
    message = refusal(book)
    assert str(book) in message
    assert "set SHARDSCALE_CACHE to a folder" in message


def test_unreadable_text_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    assert "gone.txt cannot be read (No such file" in refusal(tmp_path / "folder")


def test_folders_that_cannot_be_listed_are_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "texts" / "closed"
    for folder in (closed, closed.with_name("lost+found")):
        folder.mkdir(parents=True)
    (tmp_path / "texts" / "book.txt").write_text(TEXT)
    scandir = os.scandir

    def refused(path: str) -> object:
        if Path(path).name in ("closed", "lost+found"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    assert f"{closed} cannot be read (Permission denied)" in refusal(tmp_path / "texts")
    closed.rmdir()
    open_text(tmp_path / "texts")


def test_examples_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(json.dumps({"text": TEXT}))
    opened = Path.open

    def refused(file: Path, *arguments: object, **options: object) -> object:
        if file == path:
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return opened(file, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refused)
    assert "texts.jsonl cannot be read (Permission denied)" in refusal(path)


def test_nothing_half_built_stays_after_a_refusal(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\nnot json\n')
    refusal(tmp_path / "bad.jsonl")
    assert [path.suffix for path in (cache / "corpora").iterdir()] == [".lock"]


HOSTILE_LINES = {
    "nested": b'{"text": ' + b"[" * 100_000,
    "digits": b'{"text": "a", "id": ' + b"9" * 5000 + b"}",
    "20,000 keys": json.dumps({f"key{number}": 1 for number in range(20_000)}).encode(),
    "a long key": json.dumps({"k" * 100_000: 1}).encode(),
    "a long value": json.dumps({"text": list(range(20_000))}).encode(),
    "not an object": json.dumps("x" * 100_000).encode(),
    "control characters": b'{"a\\u001b[31m\\nb": 1}',
    "NUL": b"\0",
    "cut in a character": b'{"text": "\xf0\x9f"}',
}


@pytest.mark.parametrize("kind", HOSTILE_LINES)
def test_a_hostile_line_is_named_in_one_short_sentence(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"text": "first"}\n' + HOSTILE_LINES[kind] + b"\n")
    message = refusal(path)
    assert "records.jsonl line 2" in message
    assert len(message) < 290
    assert message.isprintable()


def test_lone_surrogates_are_replaced(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"\ud83d half a pair, number {n}"}) for n in range(200)]
    (tmp_path / "half.jsonl").write_text("\n".join(lines))
    corpus = open_text(tmp_path / "half.jsonl")
    assert len(corpus.train.tokens) > 1000


def hostile_file(folder: Path, kind: str) -> Path:
    """Make a file of a kind that a folder of texts can hold beside texts, and return its path."""
    path = folder / "text.txt"
    if kind == "gz":
        path.write_bytes(gzip.compress(TEXT.encode()))
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "control characters":
        path = folder / "a\x1b[31m\nb.txt"
        path.write_bytes(b"\xff")
    return path


@pytest.mark.parametrize("kind", ["gz", "pipe", "device", "socket", "loop", "control characters"])
@pytest.mark.parametrize("inside", [True, False], ids=["in a folder", "alone"])
def test_what_is_no_text_is_refused_and_not_waited_for(
    kind: str, inside: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("f")  # short, for the socket
    path = hostile_file(folder, kind)
    message = refusal(folder if inside else path)
    assert path.name[-4:] in message
    assert message.isprintable()


def test_linked_folders_are_read_once_each(tmp_path: Path) -> None:
    texts, elsewhere = tmp_path / "texts", tmp_path / "elsewhere"
    for folder in (texts / "own", elsewhere / "deep"):
        folder.mkdir(parents=True)
        (folder / "book.txt").write_text(TEXT)
    (elsewhere / "back").symlink_to(texts)
    for name, target in (("a", texts / "own"), ("b", elsewhere), ("c", elsewhere)):
        (texts / name).symlink_to(target)
    found = walk(texts, whole=True)
    names = [path.relative_to(texts).as_posix() for path in found]
    assert names == ["b/deep/book.txt", "own/book.txt"]
    corpus = open_text(texts)
    tokens = sum(len(s.tokens) for s in (corpus.train, corpus.validation, corpus.test))
    assert 2 * len(TEXT) < tokens < 2.2 * len(TEXT)


def test_a_link_to_another_file_of_a_folder_is_not_read_besides(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in (texts / "part-1.txt", tmp_path / "elsewhere.txt"):
        name.write_text(TEXT)
    (texts / "latest.txt").symlink_to("part-1.txt")
    (texts / "other.txt").symlink_to(tmp_path / "elsewhere.txt")
    corpus = open_text(texts)
    tokens = sum(len(s.tokens) for s in (corpus.train, corpus.validation, corpus.test))
    assert 2 * len(TEXT) < tokens < 2.2 * len(TEXT)


def test_folders_in_a_loop_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "again").symlink_to(tmp_path / "texts")
    (tmp_path / "texts" / "book.txt").write_text(TEXT)
    corpus = open_text(tmp_path / "texts")
    tokens = sum(len(s.tokens) for s in (corpus.train, corpus.validation, corpus.test))
    assert len(TEXT) < tokens < 1.2 * len(TEXT)


@pytest.mark.parametrize(
    "table",
    [
        pa.table({f"column{number}": ["a"] for number in range(5000)}),
        pa.table([["a"], ["b"]], names=["text", "text"]),
        pa.table({"text": [["a"]]}),
        pa.table({"text": pa.array(["a"]).dictionary_encode()}),
        pa.table({"text": pa.nulls(3)}),
        pa.table({"text": pa.array([], pa.string())}),
        pa.table({"a\x1b[31m\nb": ["a"]}),
    ],
    ids=["5,000 columns", "twice", "lists", "dictionary", "nulls", "no rows", "control characters"],
)
def test_odd_parquet(tmp_path: Path, table: pa.Table) -> None:
    pq.write_table(table, tmp_path / "odd.parquet")
    message = refusal(tmp_path / "odd.parquet")
    assert "odd.parquet" in message
    assert len(message) < 290
    assert message.isprintable()


def saved(folder: Path, **changes: object) -> Path:
    """A tokenizer.json with an end of text, in which some entries are something else."""
    model = models.WordLevel({"a": 0, "<|endoftext|>": 1}, unk_token="[UNK]")
    content = json.loads(Tokenizer(model).to_str())
    for key, value in changes.items():
        where = content["model"] if key in content["model"] else content
        where[key] = value
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder / "tokenizer.json"


@pytest.mark.parametrize(
    "changes",
    [
        {},  # [UNK] is not in the vocabulary
        {"vocab": {"a": "b"}},
        {"vocab": [1, 2]},
        {"vocab": {"a": -1, "<|endoftext|>": 1}},
        {"vocab": {"a": 2**32 - 1, "<|endoftext|>": 1}},
        {"model": None},
        {"type": "Banana"},
        {"added_tokens": 3},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}}},
        {"truncation": {"max_length": -1}},
    ],
    ids=str,
)
def test_a_tokenizer_file_of_wrong_types(
    book: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    message = refusal(book, tokenizer=str(saved(tmp_path, **changes)))
    assert "tokenizer" in message
    assert len(message) < 290


def test_remote_code_of_a_tokenizer_is_not_run(book: Path, tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    ran = tmp_path / "ran"
    (tmp_path / "remote" / "theirs.py").write_text(f"open({str(ran)!r}, 'w')\nclass Theirs: pass\n")
    config = {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": ["theirs.Theirs", None]}}
    (tmp_path / "remote" / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "remote" / "config.json").write_text(json.dumps({**config, "model_type": "theirs"}))
    message = refusal(book, tokenizer=f"hf:{tmp_path / 'remote'}")
    assert "remote cannot be loaded" in message
    assert len(message) < 290
    assert not ran.exists()


def test_a_loading_script_of_a_dataset_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "scripted"
    folder.mkdir()
    (folder / "scripted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    message = refusal(f"hf:{folder}")
    assert "scripted cannot be loaded" in message
    assert len(message) < 290
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "times", ["while it is tokenised", "after it was hashed", "and is then restored"]
)
def test_text_that_changes_while_it_is_read_is_not_cached(
    book: Path, cache: Path, times: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = "take_survey" if times == "after it was hashed" else "_write_tokens"
    original = getattr(corpus_build, where)

    def replaced_before(*args: object, **kwargs: object) -> object:
        book.write_text(TEXT.replace("little", "nothing"))
        result = original(*args, **kwargs)
        if times == "and is then restored":
            book.write_text(TEXT)
        return result

    monkeypatch.setattr(corpus_build, where, replaced_before)
    assert "has changed while it was read" in refusal(book)
    assert not list((cache / "corpora").glob("*/meta.json"))
