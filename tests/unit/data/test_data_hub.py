"""Datasets and tokenizers by name: the real libraries, on local folders and without a network."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from launcher.data.hub import HubDataset
from launcher.util.packages import how_to_install

ROOT = Path(__file__).parents[3]
WORDS = [
    "a",
    "few",
    "plain",
    "words",
    "that",
    "say",
    "nothing",
    "of",
    "much",
    "interest",
    "to",
    "anyone",
    "at",
    "all",
]

OPEN = """
import json, sys
from pathlib import Path
missing = json.loads(sys.argv[1])
for name in missing:
    sys.modules[name] = None  # not installed: import raises ImportError
from launcher.config.schema import DataChoice
from launcher.data import open_corpus
from launcher.util.errors import UserError
for line in sys.stdin:
    settings = json.loads(line)
    size, cache_dir = settings.pop("vocab_size"), Path(settings.pop("cache_dir"))
    try:
        corpus = open_corpus(
            DataChoice(**settings),
            vocab_size=size, seq_len=16, cache_dir=cache_dir, show_progress=False,
        )
    except UserError as error:
        print(json.dumps({"refused": str(error)}), flush=True)
    else:
        names = ("datasets", "transformers", "tokenizers")
        loaded = [name for name in names if sys.modules.get(name)]
        print(json.dumps({
            "description": corpus.description, "vocab_size": corpus.vocab_size, "loaded": loaded,
            "fingerprint": corpus.fingerprint, "end": int(corpus.train.tokens[-1]),
            "path": str(corpus.tokenizer_path), "tokens": corpus.test.tokens.tolist()}), flush=True)
"""


def opener(folder: Path, missing: tuple[str, ...]) -> "subprocess.Popen[str]":
    """A process that opens corpora and knows no network and an empty home."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    return subprocess.Popen(
        [sys.executable, "-c", OPEN, json.dumps(missing)],
        cwd=ROOT,
        env=os.environ | offline,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator["subprocess.Popen[str]"]:
    """A process for where it does not matter what it has imported: that takes seconds."""
    process = opener(tmp_path_factory.mktemp("home"), missing=())
    yield process
    process.communicate()


class Opened(Protocol):
    def __call__(
        self, folder: Path, *, missing: tuple[str, ...] | None = None, **settings: object
    ) -> dict[str, Any]: ...


@pytest.fixture
def opened(shared: "subprocess.Popen[str]", tmp_path: Path) -> Opened:
    """Opens a corpus, with a cache in a folder; where it is said what is missing, in a process of
    its own."""

    def opened(
        folder: Path, *, missing: tuple[str, ...] | None = None, **settings: object
    ) -> dict[str, Any]:
        chosen = {"data": "stdlib", "tokenizer": "byte", "vocab_size": 5000} | settings
        line = json.dumps(chosen | {"cache_dir": str(folder / "cache")}) + "\n"
        if missing is not None:
            said, errors = opener(tmp_path, missing).communicate(line)
            assert said, errors
        else:
            assert shared.stdin is not None
            assert shared.stdout is not None
            shared.stdin.write(line)
            shared.stdin.flush()
            said = shared.stdout.readline()
            assert said, shared.communicate()[1]
        answer: dict[str, Any] = json.loads(said.splitlines()[-1])
        return answer

    return opened


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    folder = tmp_path / "dataset"
    folder.mkdir()
    texts = [" ".join(WORDS[n % 7 :]) + f" {n}" for n in range(300)]
    pq.write_table(pa.table({"id": range(300), "text": texts}), folder / "train.parquet")
    return folder


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "a.txt").write_text("\n".join(" ".join(WORDS) for _ in range(400)))
    return str(tmp_path / "a.txt")


def saved_tokenizer(folder: Path, **special: str) -> Path:
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", *special.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)], trainer)
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    wrapped.save_pretrained(folder)
    return folder


def test_a_dataset_is_read_and_then_opened_warm_without_its_library(
    tmp_path: Path, opened: Opened, dataset: Path
) -> None:
    pytest.importorskip("datasets")
    cold = opened(tmp_path, data=f"hf:{dataset}", missing=())
    assert str(cold["description"]).startswith(f"hf:{dataset}: 300 documents")
    assert "datasets" in cold["loaded"]
    warm = opened(tmp_path, data=f"hf:{dataset}", missing=("datasets",))
    assert warm["fingerprint"] == cold["fingerprint"]
    assert warm["loaded"] == []


def test_a_dataset_is_read_in_its_own_splits(tmp_path: Path, opened: Opened, dataset: Path) -> None:
    pytest.importorskip("datasets")
    drawn = opened(tmp_path, data=f"hf:{dataset}@train")
    pq.write_table(pa.table({"id": [0], "text": ["held out " * 9]}), dataset / "test.parquet")
    cold = opened(tmp_path, data=f"hf:{dataset}")
    assert "301 documents" in cold["description"]
    assert cold["description"].endswith(", in splits of its own")
    assert bytes(cold["tokens"][:-1]) == b"held out " * 9
    warm = opened(tmp_path, data=f"hf:{dataset}", missing=("datasets",))
    assert warm["fingerprint"] == cold["fingerprint"]
    # Without its own splits as before.
    assert opened(tmp_path, data=f"hf:{dataset}@train")["fingerprint"] == drawn["fingerprint"]


def test_a_folder_of_the_users_home() -> None:
    """A shell leaves the ~ of hf:~/set as it is."""
    found = HubDataset.named("hf:~/set@train", "text")
    assert (found.name, found.split) == (str(Path.home() / "set"), "train")
    assert HubDataset.named("hf:allenai/c4:en", "text").name == "allenai/c4"


def test_a_held_out_split_without_text_names_the_way_without_it(
    tmp_path: Path, opened: Opened, dataset: Path
) -> None:
    pytest.importorskip("datasets")
    pq.write_table(pa.table({"id": [0], "text": [""]}), dataset / "test.parquet")
    refused = opened(tmp_path, data=f"hf:{dataset}")["refused"]
    assert "or add @train to the name, to split that" in refused


def test_a_dataset_without_a_text_column(tmp_path: Path, opened: Opened) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "dataset").mkdir()
    pq.write_table(pa.table({"body": ["a"], "id": [1]}), tmp_path / "dataset" / "train.parquet")
    message = str(opened(tmp_path, data=f"hf:{tmp_path}/dataset")["refused"])
    assert "has no column 'text' (columns: body, id)" in message


def test_a_split_is_read_and_an_unknown_one_names_the_known_ones(
    tmp_path: Path, opened: Opened, dataset: Path
) -> None:
    pytest.importorskip("datasets")
    texts = [f"other {n}" for n in range(200)]
    pq.write_table(pa.table({"id": range(200), "text": texts}), dataset / "test.parquet")
    split = opened(tmp_path, data=f"hf:{dataset}@test")
    assert "200 documents" in str(split["description"])
    streamed = opened(tmp_path, data=f"hf:{dataset}@test[:1GB]")
    assert streamed["fingerprint"] == split["fingerprint"]
    message = str(opened(tmp_path, data=f"hf:{dataset}@dev")["refused"])
    assert "dev" in message
    assert "train" in message


def test_a_stream_is_the_beginning_of_the_text_however_often_it_is_read(
    tmp_path: Path, opened: Opened, dataset: Path
) -> None:
    pytest.importorskip("datasets")
    whole = opened(tmp_path, data=f"hf:{dataset}")
    found = [opened(tmp_path / cache, data=f"hf:{dataset}[:5000]") for cache in ("a", "b")]
    assert found[0]["fingerprint"] == found[1]["fingerprint"]
    assert found[0]["tokens"] == whole["tokens"][: len(found[0]["tokens"])]
    documents = int(str(found[0]["description"]).split(": ")[1].split()[0])
    assert 50 < documents < 300
    warm = opened(tmp_path / "a", data=f"hf:{dataset}[:5000]", missing=("datasets",))
    assert warm["fingerprint"] == found[0]["fingerprint"]


def test_the_field_is_the_users(tmp_path: Path, opened: Opened, dataset: Path) -> None:
    pytest.importorskip("datasets")
    texts = pq.read_table(dataset / "train.parquet").column("text").to_pylist()
    (tmp_path / "other").mkdir()
    table = pa.table({"text": ["unused"] * len(texts), "body": texts})
    pq.write_table(table, tmp_path / "other" / "train.parquet")
    usual = opened(tmp_path, data=f"hf:{dataset}")
    named = opened(tmp_path, data=f"hf:{tmp_path}/other[:1GB]", data_field="body")
    assert named["fingerprint"] == usual["fingerprint"]
    message = str(opened(tmp_path, data=f"hf:{tmp_path}/other", data_field="bodi")["refused"])
    assert "has no column 'bodi' (columns: text, body)" in message
    assert "--data-field" in message


def test_an_unknown_configuration_names_the_known_ones(
    tmp_path: Path, opened: Opened, dataset: Path
) -> None:
    pytest.importorskip("datasets")
    message = str(opened(tmp_path, data=f"hf:{dataset}:fancy")["refused"])
    assert "fancy" in message
    assert "default" in message


def test_a_dataset_without_the_network(tmp_path: Path, opened: Opened) -> None:
    pytest.importorskip("datasets")
    message = str(opened(tmp_path, data="hf:somebody/something")["refused"])
    assert "'somebody/something'" in message
    assert "network" in message
    assert "\n" not in message


def test_a_dataset_without_the_extra(tmp_path: Path, opened: Opened) -> None:
    message = str(opened(tmp_path, data="hf:wikitext:x", missing=("datasets",))["refused"])
    assert "hf:wikitext:x needs" in message
    assert how_to_install("hf") in message


def test_a_dataset_without_a_name(tmp_path: Path, opened: Opened) -> None:
    assert "hf: names no dataset" in str(opened(tmp_path, data="hf:")["refused"])


def test_a_tokenizer_of_transformers(tmp_path: Path, opened: Opened, text: str) -> None:
    folder = saved_tokenizer(tmp_path / "tokenizer", eos_token="<end>")
    cold = opened(tmp_path, data=text, tokenizer=f"hf:{folder}")
    assert cold["end"] == 1
    assert cold["vocab_size"] <= 300
    again = Tokenizer.from_file(str(cold["path"]))
    assert " ".join(WORDS) in again.decode(cold["tokens"])
    warm = opened(tmp_path, data=text, tokenizer=f"hf:{folder}", missing=("transformers",))
    assert warm["fingerprint"] == cold["fingerprint"]
    assert warm["loaded"] == []


def test_a_tokenizer_of_transformers_written_in_python(
    tmp_path: Path, opened: Opened, text: str
) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.ByT5Tokenizer().save_pretrained(tmp_path / "byt5")
    corpus = opened(tmp_path, data=text, tokenizer=f"hf:{tmp_path}/byt5")
    assert corpus["end"] == 1
    assert corpus["path"] == "None"
    # ByT5's ids are the bytes after three special tokens
    decoded = bytes(i - 3 for i in corpus["tokens"] if i > 2).decode()
    assert " ".join(WORDS) in decoded


def test_a_tokenizer_of_transformers_without_an_end(
    tmp_path: Path, opened: Opened, text: str
) -> None:
    folder = saved_tokenizer(tmp_path / "tokenizer")
    message = str(opened(tmp_path, data=text, tokenizer=f"hf:{folder}")["refused"])
    assert f"hf:{folder} has no token that ends a text" in message


def test_a_tokenizer_larger_than_the_model(tmp_path: Path, opened: Opened, text: str) -> None:
    folder = saved_tokenizer(tmp_path / "tokenizer", eos_token="<end>")
    answer = opened(tmp_path, data=text, tokenizer=f"hf:{folder}", vocab_size=200)
    assert "is beyond the vocabulary of 200" in str(answer["refused"])


def test_a_tokenizer_without_the_network(tmp_path: Path, opened: Opened, text: str) -> None:
    pytest.importorskip("transformers")
    message = str(opened(tmp_path, data=text, tokenizer="hf:somebody/tokens")["refused"])
    assert "'somebody/tokens'" in message
    assert "network" in message
    assert "\n" not in message


def test_a_tokenizer_without_the_extra(tmp_path: Path, opened: Opened, text: str) -> None:
    answer = opened(tmp_path, data=text, tokenizer="hf:gpt2", missing=("transformers",))
    assert how_to_install("hf") in str(answer["refused"])


@pytest.mark.parametrize("part", ["", "[:8000]"])
def test_rows_of_examples_are_recognised_by_their_columns(
    tmp_path: Path, opened: Opened, part: str
) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "dataset").mkdir()
    rows = [
        {"instruction": f"Add {n} and 1.", "input": "", "output": str(n + 1)} for n in range(60)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "dataset" / "train.parquet")
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (tmp_path / "lines.jsonl").write_text(lines)
    found = opened(tmp_path, data=f"hf:{tmp_path}/dataset{part}")
    assert f"hf:{tmp_path}/dataset (instruction and output): " in str(found["description"])
    same = opened(tmp_path, data=str(tmp_path / "lines.jsonl"))
    assert (found["fingerprint"] == same["fingerprint"]) == (part == "")
    warm = opened(tmp_path, data=f"hf:{tmp_path}/dataset{part}", missing=("datasets",))
    assert warm["description"] == found["description"]
