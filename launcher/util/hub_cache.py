"""Models in the Hugging Face cache of this machine, and whether the Hub can be reached."""

import os
import socket
import threading
from functools import cache
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from launcher.util.errors import UserError, naming

HUB_PREFIX: Final = "hf:"
_ENDPOINT: Final = "https://huggingface.co"
_ANSWERS_WITHIN_S: Final = 1.0
_OFFLINE: Final = "HF_HUB_OFFLINE"
_PROXIES: Final = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY")


def model_folder(path: Path) -> Path:
    """Return the folder of `hf:ORG/NAME` in the Hub's cache; any other path stays as it is.

    Nothing is downloaded, so that bad input is rejected before a download.

    Raises:
        UserError: the cache does not hold the model.
    """
    if not str(path).startswith(HUB_PREFIX):
        return path
    name = str(path).removeprefix(HUB_PREFIX)
    local = Path(name).expanduser()
    if local.is_dir():
        return local
    with naming(f"{path}:"):
        return cached_folder(name)


def cached_folder(name: str) -> Path:
    """Return the folder of the model ORG/NAME in the Hub's cache.

    Raises:
        UserError: the cache does not hold the model.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except HFValidationError:
        raise UserError("names no model: write hf:ORG/NAME") from None
    except LocalEntryNotFoundError:
        raise UserError(
            f"is not in the cache {constants.HF_HUB_CACHE}: run `hf download {name}` first"
        ) from None


def name_of_folder(folder: Path) -> str:
    """Return a short name of a model's folder: in the Hub's cache the model's, not its commit."""
    whole = folder.absolute()
    if whole.parent.name == "snapshots" and whole.parents[1].name.startswith("models--"):
        return whole.parents[1].name.rpartition("--")[2]
    return whole.name


def go_offline_if_unreachable() -> None:
    """Make the Hugging Face libraries use their caches only where the Hub does not answer, so that
    they fail in a second and not after a minute of retries.

    Call it before they are imported, when they read the variable.
    """
    if _OFFLINE not in os.environ and not _reachable():
        os.environ[_OFFLINE] = "1"


def is_offline() -> bool:
    """Return whether the Hugging Face libraries use their caches only."""
    return os.environ.get(_OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE")


@cache
def _reachable() -> bool:
    if any(os.environ.get(name) for name in _PROXIES):
        return True  # a direct connection says nothing
    url = urlsplit(os.environ.get("HF_ENDPOINT", _ENDPOINT))
    port = url.port or (80 if url.scheme == "http" else 443)
    answered = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((url.hostname, port), _ANSWERS_WITHIN_S).close()
        except OSError:
            return
        answered.set()

    # In a thread of its own: looking up a name has no time-out.
    trial = threading.Thread(target=connect, daemon=True)
    trial.start()
    trial.join(_ANSWERS_WITHIN_S)
    return answered.is_set()
