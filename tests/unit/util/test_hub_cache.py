"""Models of the Hub's cache, and a Hub that does not answer."""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from launcher.checkpoint.pretrained.adapters import write_adapter
from launcher.checkpoint.pretrained.peft import folder_beside
from launcher.checkpoint.pretrained.weight_files import _weight_files
from launcher.config.arguments import parse_run_config
from launcher.config.families import read_hf_config
from launcher.model.lora_config import Lora
from launcher.strategies.parameters import parameter_shapes
from launcher.util import hub_cache
from launcher.util.errors import UserError
from launcher.util.json_file import read_json

SHAPE = {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 512}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one model, as `hf download` leaves it, and no network."""
    monkeypatch.setenv(hub_cache._OFFLINE, "1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--org--tiny"
    snapshot = model / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("a" * 40)
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **SHAPE}
    (snapshot / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("name", ["TinyStories", "smol_LM-Corpus", "C4", "squad"])
def test_a_prepared_dataset_is_found_by_the_librarys_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    naming = pytest.importorskip("datasets.naming")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "none"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    assert not hub_cache.is_cached(f"Org/{name}", "datasets")
    (tmp_path / f"Org___{naming.camelcase_to_snakecase(name)}").mkdir()
    assert hub_cache.is_cached(f"Org/{name}", "datasets")
    assert not hub_cache.is_cached(f"Org/{name}", "models")


def test_weights_come_from_the_cache(hub: Path) -> None:
    model = parse_run_config(["--init-from", "hf:org/tiny"]).model
    assert (model.d_model, model.layers, model.label) == (32, 1, "tiny")
    assert model.init_from is not None
    assert (model.init_from / "config.json").is_file()
    assert hub_cache.model_folder(Path(f"hf:{model.init_from}")) == model.init_from


def test_a_cache_with_the_tokenizer_alone_lacks_the_model(hub: Path) -> None:
    snapshot = hub_cache.model_folder(Path("hf:org/tiny"))
    (snapshot / "config.json").rename(snapshot / "tokenizer.json")
    with pytest.raises(UserError, match=r"is not in the cache .*hf download org/tiny"):
        hub_cache.model_folder(Path("hf:org/tiny"))


def test_an_index_that_the_cache_lacks_is_downloaded_first(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot, shard = (
        hub_cache.model_folder(Path("hf:org/tiny")),
        "model-00001-of-00001.safetensors",
    )
    index = json.dumps({"weight_map": {"wte.weight": shard}})
    there = {"model.safetensors.index.json": index, shard: "", "consolidated.safetensors": ""}

    def download(name: str, patterns: tuple[str, ...], *, revision: str | None) -> Path:
        for pattern in there.keys() & set(patterns):
            (snapshot / pattern).write_text(there[pattern])
        return snapshot

    monkeypatch.setattr(hub_cache, "_download", download)
    assert _weight_files(snapshot) == [snapshot / shard]
    assert not (snapshot / "consolidated.safetensors").exists()


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": []}', '{"weight_map": {"a": []}}'])
def test_a_damaged_index_in_the_cache_is_one_sentence(index: str, hub: Path) -> None:
    snapshot = hub_cache.model_folder(Path("hf:org/tiny"))
    (snapshot / "model.safetensors").touch()
    path = snapshot / "model.safetensors.index.json"
    path.write_text(index)
    with pytest.raises(UserError) as caught:
        _weight_files(snapshot)
    assert str(caught.value).startswith(str(hub))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hf:org/other", r"^--init-from hf:org/other: is not in the cache .*hf download org/other"),
        ("hf:a/b/c", "^--init-from hf:a/b/c: names no model: write hf:ORG/NAME"),
    ],
)
def test_a_model_that_is_not_there(text: str, says: str, hub: Path) -> None:
    with pytest.raises(UserError, match=says):
        parse_run_config(["--init-from", text])


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in (*hub_cache._PROXIES, hub_cache._OFFLINE):
        monkeypatch.setenv(name, "")  # restored afterwards, even where it was not set
        monkeypatch.delenv(name)
    hub_cache._reachable.cache_clear()
    yield monkeypatch
    hub_cache._reachable.cache_clear()


def test_a_hub_that_answers_is_asked_and_another_is_not(unset: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        unset.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        hub_cache.go_offline_if_unreachable()
        assert "HF_HUB_OFFLINE" not in os.environ
        assert not hub_cache.is_offline()
    hub_cache._reachable.cache_clear()
    hub_cache.go_offline_if_unreachable()
    assert hub_cache.is_offline()


SERVER = '''
import hashlib, http.server, json, pathlib, sys

folder = pathlib.Path(sys.argv[1])
commit = "c" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """The three answers of the Hub that a download asks for."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        files = list(folder.iterdir())
        if path.startswith("/api/models/org/tiny/tree/"):
            tree = [{"path": f.name, "size": f.stat().st_size} for f in files]
            tree = [{"type": "file", "oid": ""} | each for each in tree]
            return self.answer(json.dumps(tree).encode())
        if path.startswith("/api/models/org/tiny"):
            siblings = [{"rfilename": f.name} for f in files]
            found = {"id": "org/tiny", "sha": commit, "siblings": siblings}
            return self.answer(json.dumps(found).encode())
        if path.startswith("/org/tiny/resolve/") and (folder / path.rpartition("/")[2]).is_file():
            return self.answer((folder / path.rpartition("/")[2]).read_bytes())
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def answer(self, body):
        print(self.command, self.path, file=sys.stderr, flush=True)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"' + hashlib.sha256(body).hexdigest() + '"')
        self.send_header("X-Repo-Commit", commit)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
print(server.server_port, flush=True)
server.serve_forever()
'''


@pytest.fixture
def served(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A Hub with one model, as the environment of a process that knows no other."""
    import transformers

    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**SHAPE, bos_token_id=0, eos_token_id=0)
    )
    model.save_pretrained(tmp_path / "model")
    command = [sys.executable, "-c", SERVER, str(tmp_path / "model")]
    with (tmp_path / "asked").open("w") as asked:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=asked, text=True)
    assert server.stdout is not None
    port = server.stdout.readline().strip()
    theirs = dict.fromkeys((*hub_cache._PROXIES, hub_cache._OFFLINE), "")
    here = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path / "cache")}
    yield {**os.environ, **theirs, **here}
    server.kill()
    server.wait()


def test_weights_are_downloaded_once_all_else_is_checked(
    tmp_path: Path, served: dict[str, str]
) -> None:
    (tmp_path / "model" / "consolidated.safetensors").touch()  # the same in other names
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be: that is the question. " * 200)

    def train(flags: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "launcher.train", "--data", str(text), *flags.split()],
            env=served,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    begun = "--tokenizer byte --steps 1 --micro-batch 1 --device cpu --report-to none --out run"
    assert train(f"--init-from hf:org/tiny {begun} --optimizer lion").returncode == 2
    assert "model.safetensors" not in (tmp_path / "asked").read_text()
    done = train(f"--init-from hf:org/tiny {begun}")
    assert done.returncode == 0, done.stderr
    assert "downloading the weights of org/tiny" in done.stderr
    assert "begins with the weights of" in done.stdout
    asked = (tmp_path / "asked").read_text()
    assert "GET /org/tiny/resolve/" in asked
    assert asked.count("model.safetensors") > 0
    assert "consolidated" not in asked
    missing = train(f"--init-from hf:org/other {begun}")
    assert missing.returncode == 2
    assert "there is no such model on the Hugging Face Hub" in missing.stderr


def test_an_adapter_names_its_base_of_the_hub_and_the_commit(hub: Path, tmp_path: Path) -> None:
    other = tmp_path / "models--org--tiny" / "snapshots" / ("b" * 40)
    shutil.copytree(other.with_name("a" * 40), other)
    folder = tmp_path / "adapter"
    folder.mkdir()
    config = dataclasses.replace(read_hf_config(other / "config.json"), lora=Lora(rank=2, alpha=4))
    shapes = parameter_shapes(config)
    write_adapter(
        folder, config, lambda n: torch.zeros(shapes[n]), base=str(other), dtype=torch.float32
    )
    settings = read_json(folder / "adapter_config.json")
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("org/tiny", "b" * 40)
    assert folder_beside(folder) == other  # and not the one that `main` is
    for revision, said in (("c" * 40, "--revision c"), ("../main", "names no commit")):
        settings["revision"] = revision
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        with pytest.raises(UserError, match=said):
            folder_beside(folder)


def test_an_adapter_of_the_hub_is_imported_with_its_base(
    tmp_path: Path, served: dict[str, str]
) -> None:
    import peft
    import transformers

    base = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "model")
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    peft.get_peft_model(base, lora).save_pretrained(str(tmp_path / "adapter"))

    def imported(adapter: Path, base: str, folder: str) -> None:
        path = adapter / "adapter_config.json"
        path.write_text(json.dumps({**read_json(path), "base_model_name_or_path": base}))
        done = subprocess.run(
            [sys.executable, "-m", "launcher", "import", folder, "--out", f"run-{adapter.name}"],
            env=served,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr

    imported(tmp_path / "adapter", "org/tiny", "adapter")
    served["HF_HOME"] = str(tmp_path / "other")
    (tmp_path / "model").rename(tmp_path / "base")
    (tmp_path / "adapter").rename(tmp_path / "model")  # what the Hub has, from now on
    imported(tmp_path / "model", str(tmp_path / "base"), "hf:org/tiny")
