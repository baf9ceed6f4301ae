"""Models in the Hugging Face cache of this machine, downloads into it, and whether the Hub can be
reached."""

import os
import socket
import sys
import threading
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from launcher.util.errors import UserError, naming

HUB_PREFIX: Final = "hf:"
_ENDPOINT: Final = "https://huggingface.co"
_ANSWERS_WITHIN_S: Final = 1.0
_OFFLINE: Final = "HF_HUB_OFFLINE"
_SMALL: Final = ("*.json", "*.jinja", "*.model", "*.txt")
_CONFIGS: Final = ("config.json", "adapter_config.json")
SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = f"{SINGLE_FILE}.index.json"
_PROXIES: Final = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY")


def model_folder(path: Path) -> Path:
    """Return the folder of `hf:ORG/NAME` in the Hub's cache; any other path stays as it is.

    Raises:
        UserError: the cache does not hold the model, and it cannot be downloaded.
    """
    if not str(path).startswith(HUB_PREFIX):
        return path
    name = str(path).removeprefix(HUB_PREFIX)
    local = Path(name).expanduser()
    if local.is_dir():
        return local
    with naming(f"{path}:"):
        return cached_folder(name)


def existing_model(path: Path) -> Path:
    """Return the `model_folder` of a path.

    Raises:
        UserError: as of that, or there is no such folder.
    """
    folder = model_folder(path)
    if not folder.exists():
        raise UserError(
            f"{folder}: does not exist: give a folder that holds a model, or {HUB_PREFIX}ORG/NAME"
        )
    return folder


def cached_folder(name: str, revision: str | None = None) -> Path:
    """Return the folder of the model ORG/NAME in the Hub's cache; config and tokenizer are
    downloaded where it has none. Weights follow when they are read (`fetch_weights`), after all
    other input has been checked.

    Raises:
        UserError: the cache does not hold the model, and it cannot be downloaded.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except HFValidationError:
        raise UserError("names no model: write hf:ORG/NAME") from None
    except LocalEntryNotFoundError:
        return _download(name, _SMALL, revision=revision)
    # Other programs cache single files, as AutoTokenizer does.
    if any((folder / config).is_file() for config in _CONFIGS):
        return folder
    return _download(name, _SMALL, revision=folder.name)


def fetch_weights(folder: Path, shards: Collection[str]) -> None:
    """Download the weights of a model whose folder in the Hub's cache lacks them.

    Args:
        shards: names of the files in the model's index. Without any, the index is downloaded where
            there is one, or else the only file.

    Raises:
        UserError: they cannot be downloaded.
    """
    name = name_in_cache(folder)
    # Not *.safetensors: some models lie there a second time, as consolidated.safetensors.
    needed = set(shards) or {SINGLE_FILE}
    if name is not None and not all((folder / file).exists() for file in needed):
        patterns = tuple(sorted(shards)) or (SINGLE_FILE, INDEX_FILE)
        with naming(f"hf:{name}:"):
            # the folder's name is the commit that its config is from
            _download(name, patterns, revision=folder.absolute().name)


def _download(name: str, patterns: tuple[str, ...], *, revision: str | None) -> Path:
    """Download files of a model into the cache. Ranks of one machine wait for each other there."""
    from huggingface_hub import constants, errors, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if is_offline() or not _reachable():
        download = f"hf download {name}{f' --revision {revision}' if revision else ''}"
        raise UserError(
            f"is not in the cache {constants.HF_HUB_CACHE}, and the Hugging Face Hub cannot be "
            f"reached: connect to the network, or run `{download}` where there is one"
        )
    main = os.environ.get("RANK", "0") == "0"
    if main and patterns != _SMALL:
        print(f"downloading the weights of {name} from the Hugging Face Hub", file=sys.stderr)
    if not main or patterns == _SMALL or not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except errors.RepositoryNotFoundError:
        raise UserError(
            "there is no such model on the Hugging Face Hub, or it is private: check the name, or "
            "log in with `hf auth login`"
        ) from None
    except Exception as error:  # many kinds: a gate, a time-out, a full disk
        raise UserError(f"cannot be downloaded: {' '.join(str(error).split())}") from None


def name_of_folder(folder: Path) -> str:
    """Return a short name of a model's folder: in the Hub's cache the model's, not its commit."""
    return (name_in_cache(folder) or folder.absolute().name).rpartition("/")[2]


def name_in_cache(folder: Path) -> str | None:
    """Return ORG/NAME of a model's folder in the Hub's cache."""
    whole = folder.absolute()
    if whole.parent.name != "snapshots" or not whole.parents[1].name.startswith("models--"):
        return None
    # no name on the Hub has -- in it
    return whole.parents[1].name.removeprefix("models--").replace("--", "/")


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


def is_cached(name: str, kind: Literal["models", "datasets"]) -> bool:
    """Return whether the caches of this machine hold anything of ORG/NAME."""
    from huggingface_hub import constants

    if (Path(constants.HF_HUB_CACHE) / f"{kind}--{name.replace('/', '--')}").is_dir():
        return True
    # As the library prepares them: org/TinyStories is org___tiny_stories there.
    own = os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets"
    prepared = Path(own).glob("*") if kind == "datasets" else ()
    return any(_without_case(folder.name) == _without_case(name) for folder in prepared)


def _without_case(name: str) -> str:
    return name.replace("/", "").replace("_", "").lower()


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
