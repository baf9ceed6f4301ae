"""Text to token ids: trained here, bytes, a tokenizer.json, or a tokenizer of transformers."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from launcher.data.content import hash_files, hub_key
from launcher.data.hub import HUB_PREFIX
from launcher.errors import UserError
from launcher.extras import how_to_install

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
SMALLEST_BPE_VOCABULARY = 257  # 256 bytes and the end-of-text token

_HEARD_WITHIN_S = 0.2
_KNOWN_END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class Encoder(Protocol):
    """Turns texts into token ids."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def end_of_text(self) -> int:
        """The id that ends a document."""

    def encode(self, texts: list[str]) -> Sequence[Sequence[int] | np.ndarray]:
        """The ids of each text, without special tokens."""

    def save(self, path: Path) -> None:
        """Writes a tokenizer.json, where the tokenizer has that form."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FastEncoder:
    """A tokenizer of the `tokenizers` library."""

    tokenizer: Tokenizer
    vocab_size: int
    end_of_text: int

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, without special tokens."""
        try:
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise UserError(
                f"the tokenizer cannot encode this text ({error}): add the token it lacks, or give "
                "bpe"
            ) from error
        return [encoding.ids for encoding in encodings]

    def save(self, path: Path) -> None:
        """Writes the tokenizer.json."""
        self.tokenizer.save(str(path))


class ByteEncoder:
    """Each UTF-8 byte is a token: ids 0 to 255, and 256 ends a document."""

    vocab_size = 257
    end_of_text = 256

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, without special tokens."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def save(self, path: Path) -> None:
        """Writes the same mapping as a BPE without merges, so that it can be exported."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
        tokenizer.save(str(path))


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonEncoder:
    """A tokenizer of transformers that has no fast form, so no tokenizer.json either."""

    tokenizer: Any
    vocab_size: int
    end_of_text: int

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, without special tokens."""
        ids: list[list[int]] = self.tokenizer(texts, add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        return ids

    def save(self, path: Path) -> None:
        """Writes nothing: there is no such form."""


def tokenizer_key(tokenizer: str, vocab_size: int) -> str:
    """Names the tokenizer for the cache without loading it; refuses what cannot be one.

    Raises:
        UserError: no such choice or file, or a vocabulary too small for bytes.
    """
    if tokenizer == "bpe":
        if vocab_size < SMALLEST_BPE_VOCABULARY:
            raise UserError(
                f"a vocabulary of {vocab_size} is too small for byte-level BPE: "
                f"give at least {SMALLEST_BPE_VOCABULARY} (256 bytes and {END_OF_TEXT})"
            )
        return f"bpe {vocab_size}"
    if tokenizer == "byte":
        return "byte"
    if tokenizer.startswith(HUB_PREFIX):
        return f"hf {hub_key(tokenizer.removeprefix(HUB_PREFIX))}"
    path = Path(tokenizer).expanduser()
    if not path.is_file():  # nor a pipe
        raise UserError(
            f"there is no tokenizer {tokenizer!r}: give bpe, byte, hf:NAME "
            "or the path of a tokenizer.json"
        )
    return f"file {hash_files([path])}"


def load_encoder(tokenizer: str) -> Encoder:
    """The encoder of any choice but `bpe`, which is trained (train_bpe)."""
    if tokenizer == "byte":
        return ByteEncoder()
    if tokenizer.startswith(HUB_PREFIX):
        return _load_from_transformers(tokenizer)
    from tokenizers import Tokenizer

    try:
        loaded = Tokenizer.from_file(str(Path(tokenizer).expanduser()))
    except Exception as error:  # the library raises bare Exception
        raise UserError(
            f"{tokenizer} cannot be read as a tokenizer.json ({error}): save it again with the "
            "tokenizers library, or give bpe"
        ) from error
    ends = (loaded.token_to_id(token) for token in _KNOWN_END_TOKENS)
    return _fast(loaded, next((end for end in ends if end is not None), None), tokenizer)


def train_bpe(texts: list[str], vocab_size: int) -> FastEncoder:
    """Trains byte-level BPE as in GPT-2 (Radford et al. 2019); fewer merges where text is short."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    _heard(lambda: tokenizer.train_from_iterator(texts, trainer))
    return _fast(tokenizer, tokenizer.token_to_id(END_OF_TEXT), "bpe")


@functools.cache
def tokenizer_fingerprint(path: Path) -> str:
    """Hash of which text gets which ids by a tokenizer.json, however the file spells it."""
    from tokenizers import Tokenizer

    document = json.loads(Tokenizer.from_file(str(path)).to_str())
    meaning = {name: document[name] for name in ("model", "normalizer", "pre_tokenizer")}
    meaning["added"] = sorted((token["id"], token["content"]) for token in document["added_tokens"])
    text = json.dumps(_without_defaults(meaning), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _without_defaults(value: Any) -> Any:
    """Versions of the library differ in what they spell out of what is off."""
    if not isinstance(value, dict):
        return value
    off = (None, False)
    return {
        key: _without_defaults(part)
        for key, part in value.items()
        if part != "" and not any(part is nothing for nothing in off)
    }


def _heard(train: Callable[[], None]) -> None:
    """Run what takes minutes outside of Python, in a thread, so that this one hears signals."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            train()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)  # must not keep an ending process alive
    thread.start()
    while thread.is_alive():
        thread.join(timeout=_HEARD_WITHIN_S)
    if failed:
        raise failed[0]


def check_vocabulary(tokenizer: str, tokenizer_size: int, vocab_size: int) -> None:
    """Refuses a tokenizer whose ids the model cannot embed."""
    if tokenizer_size > vocab_size:
        raise UserError(
            f"tokenizer {tokenizer}: token id {tokenizer_size - 1} is beyond the vocabulary of "
            f"{vocab_size}: set the model's vocabulary size to {tokenizer_size} or more"
        )


def _fast(tokenizer: Tokenizer, end_of_text: int | None, name: str) -> FastEncoder:
    if end_of_text is None:
        raise UserError(
            f"tokenizer {name} has no token that ends a text: add one of "
            f"{', '.join(_KNOWN_END_TOKENS)} to it"
        )
    # Files that were saved for inference may cut texts to the length of a context, or pad them.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # The largest id, not the count: vocabularies can have holes.
    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return FastEncoder(tokenizer=tokenizer, vocab_size=size, end_of_text=end_of_text)


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's encoder.py):
    itself when it is printable, else the next one from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    following = itertools.count(256)
    return [chr(byte if byte in printable else next(following)) for byte in range(256)]


def _load_from_transformers(tokenizer: str) -> Encoder:
    name = tokenizer.removeprefix(HUB_PREFIX)
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UserError(
            f"tokenizer {tokenizer} needs the library transformers: {how_to_install('hf')}"
        ) from error
    try:
        loaded: Any = AutoTokenizer.from_pretrained(
            str(Path(name).expanduser()),
            trust_remote_code=False,  # not asked on the terminal either
        )
    except Exception as error:
        # Of many kinds, by what is wrong in which file; the same for a wrong name and no network.
        reason = " ".join(str(error).split())
        raise UserError(
            f"tokenizer {tokenizer} cannot be loaded: check the name {name!r} and the network, "
            f"or give a local folder ({reason})"
        ) from error
    end = loaded.eos_token_id if loaded.eos_token_id is not None else loaded.sep_token_id
    if loaded.is_fast:
        return _fast(loaded.backend_tokenizer, end, tokenizer)
    if end is None:
        raise UserError(f"tokenizer {tokenizer} has no token that ends a text: choose another")
    size = max(loaded.get_vocab().values()) + 1
    return PythonEncoder(tokenizer=loaded, vocab_size=size, end_of_text=end)
