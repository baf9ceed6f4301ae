"""Models of the Hub's cache, and a Hub that does not answer."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from launcher.config.arguments import parse_run_config
from launcher.util import hub_cache
from launcher.util.errors import UserError

SHAPE = {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 512}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one model, as `hf download` leaves it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--org--tiny"
    snapshot = model / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("a" * 40)
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **SHAPE}
    (snapshot / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_weights_come_from_the_cache(hub: Path) -> None:
    model = parse_run_config(["--init-from", "hf:org/tiny"]).model
    assert (model.d_model, model.layers, model.label) == (32, 1, "tiny")
    assert model.init_from is not None
    assert (model.init_from / "config.json").is_file()
    assert hub_cache.model_folder(Path(f"hf:{model.init_from}")) == model.init_from


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
