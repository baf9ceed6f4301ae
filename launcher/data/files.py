"""Files that a corpus is read from, with the keys that name their content, and the folder of files
that it is stored in."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from launcher.util.errors import WHY, UserError, refused
from launcher.util.files import replace_text
from launcher.util.hub_cache import HUB_PREFIX as HUB_PREFIX
from launcher.util.json_file import json_object

TEXT_FIELD = "text"
COMPRESSED = ".gz"
SPLITS = ("train", "validation", "test")
_SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_BETWEEN_WORDS = re.compile(r"[^a-z]+")
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
_BESIDE_TOKENIZER = (
    *(TOKENIZER_CONFIG_FILE, "special_tokens_map.json", "added_tokens.json"),
    *(CHAT_TEMPLATE_FILE, "tokenizer.model"),  # sentencepiece's, which llama.cpp converts
)
_NAMED_TEMPLATES = "additional_chat_templates/*.jinja"
META_FILE = "meta.json"
Kind = Literal["tokens", "documents", "learned"]

MEMO_BYTES = 256 << 20
_WEIGHTS = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data"}
)
"""Suffixes of files that no tokenizer reads; a model's folder can hold hundreds of GB of them."""


def walk(root: Path, skip: frozenset[str] = frozenset(), *, whole: bool = False) -> list[Path]:
    """List the files below `root`, without hidden ones, sorted by relative path.

    Args:
        skip: names of folders to leave out.
        whole: follow links to folders elsewhere, each once, and leave nothing out unsaid.

    Raises:
        UserError: `whole`, and a folder cannot be listed.
    """
    found: list[Path] = []
    home = os.path.realpath(root)
    seen = {home}

    def refuse(error: OSError) -> None:
        with reading(error.filename):
            raise error

    def is_new(path: str) -> bool:
        real = os.path.realpath(path)
        # what a link within the folder leads to is listed without it
        if real in seen or (os.path.islink(path) and Path(real).is_relative_to(home)):
            return False
        seen.add(real)
        return True

    for folder, folders, files in os.walk(
        root, onerror=refuse if whole else None, followlinks=whole
    ):
        # In place: os.walk then does not enter them, and site-packages can hold 100,000 files.
        folders[:] = sorted(n for n in folders if n not in skip and not n.startswith("."))
        if whole:
            new = (name for name in folders if is_new(os.path.join(folder, name)))
            folders[:] = [name for name in new if name != "lost+found"]  # a file system's own
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted(found)


def named_split(name: str) -> str | None:
    """Return the split that a word of a name says, the first part of a path before the others
    (`dev-00000-of-2.parquet` -> validation); None without such a word, or with several."""
    for part in name.lower().split("/"):
        said = {_SPLIT_NAMES[word] for word in _BETWEEN_WORDS.split(part) if word in _SPLIT_NAMES}
        if said:
            return said.pop() if len(said) == 1 else None
    return None


def shared_splits(named: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Named splits -> the splits of a corpus that each gives: a single held-out one gives both. {}
    where they do not include training and held-out text."""
    held_out = [split for split in SPLITS[1:] if split in named]
    if "train" not in named or not held_out:
        return {}
    both = {held_out[0]: SPLITS[1:]} if len(held_out) == 1 else {s: (s,) for s in held_out}
    return {"train": ("train",), **both}


def kind_of(path: Path) -> str:
    """Return the suffix that says what a file holds: that before .gz, if it is compressed."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix == COMPRESSED else suffix


def hash_files(paths: Sequence[Path]) -> str:
    """Return the SHA-256 of the files' contents and suffixes, in order; names do not count."""
    digest = hashlib.sha256()
    for path in paths:
        with reading(path):
            if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block
                raise UserError(f"{path} is a pipe or a device: give a file, or remove it")
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
        suffix = kind_of(path) + (COMPRESSED if path.suffix.lower() == COMPRESSED else "")
        digest.update(suffix.encode() + content)
    return digest.hexdigest()


def stamps(paths: Sequence[Path]) -> list[tuple[str, int, int, int, int]]:
    """Return path, size, times of change and inode of each file.

    Equal stamps before and after reading prove that the bytes stayed the same: ctime cannot be set
    back, so a file that was replaced and restored has another one.
    """
    found = []
    for path in paths:
        with reading(path):
            found.append((path, path.stat()))
    return [
        (str(path.absolute()), info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)
        for path, info in found
    ]


def hash_once(paths: Sequence[Path], memo_dir: Path) -> str:
    """Return `hash_files`, of a large text from `memo_dir` until a file's stamp changes: otherwise
    every rank of every run would read all of it, only to find it unchanged."""
    found = stamps(paths)
    if sum(size for _, size, *_ in found) < MEMO_BYTES:
        return hash_files(paths)
    memo = memo_dir / hashlib.sha256(repr(found).encode()).hexdigest()
    with contextlib.suppress(OSError):
        if key := memo.read_text(encoding="utf-8"):
            return key
    key = hash_files(paths)
    # A file written just now could change again within the same time stamp.
    if max(mtime_ns for _, _, mtime_ns, *_ in found) < (time.time() - 60) * 1e9:
        with contextlib.suppress(OSError):  # a cache that others share may be theirs to write
            memo_dir.mkdir(parents=True, exist_ok=True)
            replace_text(memo, key)
    return key


def hub_files(name: str) -> list[Path]:
    """List the files of a dataset that is a local folder; [] for one on the Hub."""
    folder = Path(name).expanduser()
    return walk(folder, whole=True) if folder.is_dir() else []


def hub_tokenizer_files(name: str) -> list[Path]:
    """List the files of a tokenizer that is a local folder, without the weights of its model."""
    return [path for path in hub_files(name) if path.suffix.lower() not in _WEIGHTS]


def dataset_key(name: str, memo_dir: Path) -> str:
    """Return the key of a dataset: a local folder's content, or the name on the Hub.

    A warm start must not ask the network, so a change on the Hub goes unnoticed.
    """
    return _hub_key(name, hub_files(name), partial(hash_once, memo_dir=memo_dir))


def hub_tokenizer_key(name: str) -> str:
    """Return the key of a tokenizer of transformers, as `dataset_key` does."""
    return _hub_key(name, hub_tokenizer_files(name), hash_files)


def _hub_key(name: str, files: Sequence[Path], hashed: Callable[[Sequence[Path]], str]) -> str:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return name
    # The names, too: they say which file is which split, or which part of a tokenizer.
    names = json.dumps([path.relative_to(folder).as_posix() for path in files])
    return f"{hashed(files)} {hashlib.sha256(names.encode()).hexdigest()}"


def field_key(field: str) -> str:
    """Return the suffix of a content key for another field than the usual one."""
    return "" if field == TEXT_FIELD else f" {field}"


def reading(path: Path | str) -> contextlib.AbstractContextManager[None]:
    """Return a context for reading a file: one that cannot be read is rejected."""
    return refused(OSError, f"{path} cannot be read ({WHY}): correct or remove the file")


def template_files(tokenizer: str) -> list[Path]:
    """List the files beside a tokenizer.json that hold its chat template, if any."""
    path = Path(tokenizer).expanduser()
    hold = (TOKENIZER_CONFIG_FILE, ".jinja")
    return [f for f in files_beside(path.parent) if f.name.endswith(hold)] if path.is_file() else []


def files_beside(folder: Path) -> list[Path]:
    """List the files beside a tokenizer.json that are kept as they are, from an import or a
    download through training to an export."""
    found = [path for name in _BESIDE_TOKENIZER if (path := folder / name).is_file()]
    return [*found, *sorted(folder.glob(_NAMED_TEMPLATES))]


def copy_files(paths: Iterable[Path], source: Path, target: Path) -> None:
    """Copy files of one folder, or below it, into another."""
    for path in paths:
        copy = target / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def end_token_beside(tokenizer: str) -> str | int | None:
    """Return the token that ends a text, or its id, as the files beside a tokenizer.json name it.

    Chat models end their turns, and so their texts, with another token than they were pretrained
    with: transformers stops there, and the tokenizer.json alone does not say so.
    """
    path = Path(tokenizer).expanduser()
    # Of a damaged file, what needs it will say so.
    named = json_object(path.with_name(TOKENIZER_CONFIG_FILE)).get("eos_token")
    if isinstance(named, dict):  # an added token with its options
        named = named.get("content")
    if isinstance(named, str):
        return named
    for name in ("config.json", "generation_config.json"):
        listed = json_object(path.with_name(name)).get("eos_token_id")
        number = listed[0] if isinstance(listed, list) and listed else listed
        if isinstance(number, int):
            return number
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Meta:
    """Description of a corpus folder (`meta.json`), written last."""

    documents: int
    text_bytes: int
    sample_bytes: int  # text the BPE tokenizer saw; 0 for other tokenizers
    vocab_size: int
    dtype: str
    tokens: dict[str, int]
    split_documents: dict[str, int]
    learned: dict[str, int] | None  # tokens to learn; None where all are
    fingerprint: str
    form: str = "text"  # of the examples; older folders lack it
    named_splits: bool = False  # as the source has them; older folders lack it
    rows: int = 0  # of an embedding, that its tokens need; older folders lack it


def read_meta(directory: Path) -> Meta | None:
    """Return the description of a complete corpus folder; None if it is missing or damaged."""
    try:
        meta = Meta(**json.loads((directory / META_FILE).read_text(encoding="utf-8")))
        width = np.dtype(meta.dtype).itemsize
        whole = all(
            _size(directory, split, "tokens") == meta.tokens[split] * width
            and _size(directory, split, "documents") == 8 * meta.split_documents[split]
            and (meta.learned is None or _size(directory, split, "learned") == meta.tokens[split])
            for split in SPLITS
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return meta if whole else None


def split_file(directory: Path, split: str, kind: Kind) -> Path:
    """Return the path of a split's file: its tokens; int64 indices of the tokens that begin a
    document; or, where not all tokens are learned, a uint8 flag per token."""
    return directory / (f"{split}.bin" if kind == "tokens" else f"{split}.{kind}.bin")


def _size(directory: Path, split: str, kind: Kind) -> int:
    return split_file(directory, split, kind).stat().st_size
