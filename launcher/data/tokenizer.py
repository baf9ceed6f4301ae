"""Text to token ids: trained here, bytes, a tokenizer.json, or a tokenizer of transformers."""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from launcher.data.files import HUB_PREFIX, end_token_beside, hash_files, hub_tokenizer_key
from launcher.util.errors import WHY, UserError, refused
from launcher.util.json_file import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from launcher.data.hub import PythonEncoder

END_OF_TEXT = "<|endoftext|>"
SMALLEST_BPE_VOCABULARY = 257  # 256 bytes and the end-of-text token

_ENCODES = f"the tokenizer cannot encode this text ({WHY}): add the token it lacks, or give bpe"
"""Refusal of a text; the library raises bare Exception."""
_SIGNAL_WITHIN_S = 0.2
_MOST_FILE_BYTES = 2**27  # Gemma 3, with 262,000 tokens, has 33 MB
_KNOWN_END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


@dataclass(frozen=True, kw_only=True, slots=True)
class FastEncoder:
    """A tokenizer of the `tokenizers` library."""

    tokenizer: Tokenizer
    vocab_size: int
    end_of_text: int
    rows: int
    """Rows of an embedding that text needs which spells out no added token: Gemma 3 1B's tokenizer
    has one more, for images, than its model has rows."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        with refused(Exception, _ENCODES):
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_prompt(self, text: str) -> list[int]:
        with refused(Exception, _ENCODES):
            ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=not special)
        return text

    def save(self, path: Path) -> None:
        self.tokenizer.save(str(path))


class ByteEncoder:
    """Each UTF-8 byte is a token: ids 0 to 255, and 256 ends a document."""

    vocab_size = rows = 257
    end_of_text = 256

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def encode_prompt(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        end = END_OF_TEXT.encode() if special else b""
        known = (bytes([n]) if n < self.end_of_text else end for n in ids)
        return b"".join(known).decode(errors="replace")

    def save(self, path: Path) -> None:
        """Write the same mapping as a BPE without merges."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        # Printable bytes stand for themselves, the others for 256 and on (GPT-2's encoder.py).
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        others = (character for character in alphabet if ord(character) > 255)
        vocabulary = {chr(n) if chr(n) in alphabet else next(others): n for n in range(256)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
        tokenizer.save(str(path))


Encoder: TypeAlias = "FastEncoder | ByteEncoder | PythonEncoder"
"""Converts texts to token ids. `encode` adds no special tokens; `encode_prompt` adds those that the
tokenizer begins a text with. `end_of_text` is the id that ends a document. `decode` leaves special
tokens out unless asked for them, and gives U+FFFD for an incomplete character. `vocab_size` is the
largest id plus one. `save` writes a tokenizer.json if the tokenizer has that form."""


def tokenizer_key(tokenizer: str, vocab_size: int) -> str:
    """Return the tokenizer's part of a cache key, without loading it.

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
        return f"hf {hub_tokenizer_key(tokenizer.removeprefix(HUB_PREFIX))}"
    path = Path(tokenizer).expanduser()
    if not path.is_file():  # nor a pipe
        raise UserError(
            f"there is no tokenizer {tokenizer!r}: give bpe, byte, hf:NAME "
            "or the path of a tokenizer.json"
        )
    return f"file {hash_files([path])} {end_token_beside(tokenizer)}"


def load_encoder(tokenizer: str) -> Encoder:
    """Load the encoder of any choice but `bpe`, which is trained (train_bpe)."""
    if tokenizer == "byte":
        return ByteEncoder()
    if tokenizer.startswith(HUB_PREFIX):
        return _encoder_of_transformers(tokenizer)
    from tokenizers import Tokenizer

    path = Path(tokenizer).expanduser()
    document = read_json(path, what="a tokenizer.json", most_bytes=_MOST_FILE_BYTES)
    with refused(
        Exception,  # the library raises it bare
        f"{tokenizer} cannot be read as a tokenizer.json ({WHY}): save it again with the "
        "tokenizers library, or give bpe",
    ):
        loaded = Tokenizer.from_file(str(path))
    _check_added(document, loaded, tokenizer)
    named = end_token_beside(tokenizer)
    if isinstance(named, int):
        named = loaded.id_to_token(named)
    ends = (loaded.token_to_id(token) for token in (named, *_KNOWN_END_TOKENS) if token)
    return _fast(loaded, next((end for end in ends if end is not None), None), tokenizer)


def train_bpe(texts: list[str], vocab_size: int) -> FastEncoder:
    """Train byte-level BPE as in GPT-2 (Radford et al. 2019); a short text gives fewer merges."""
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
    _interruptible(lambda: tokenizer.train_from_iterator(texts, trainer))
    return _fast(tokenizer, tokenizer.token_to_id(END_OF_TEXT), "bpe")


@functools.cache
def tokenizer_fingerprint(path: Path) -> str:
    """Hash the mapping from text to ids of a tokenizer.json, however the file is written."""
    from tokenizers import Tokenizer

    document = json.loads(Tokenizer.from_file(str(path)).to_str())
    meaning = {name: document[name] for name in ("model", "normalizer", "pre_tokenizer")}
    meaning["added"] = sorted((token["id"], token["content"]) for token in document["added_tokens"])
    text = json.dumps(_without_defaults(meaning), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _without_defaults(value: Any) -> Any:
    # Versions of the library differ in which disabled options they write.
    if not isinstance(value, dict):
        return value
    return {
        key: _without_defaults(part)
        for key, part in value.items()
        if part != "" and part is not None and part is not False
    }


def _interruptible(train: Callable[[], None]) -> None:
    """Run minutes of native code in a thread, so that this one can handle signals."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            train()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)  # must not keep an ending process alive
    thread.start()
    while thread.is_alive():
        thread.join(timeout=_SIGNAL_WITHIN_S)
    if failed:
        raise failed[0]


def check_vocabulary(tokenizer: str, ids: int, vocab_size: int) -> None:
    """Reject a tokenizer whose ids the model cannot embed.

    Args:
        ids: one more than the largest id that the text has or can have.

    Raises:
        UserError: they are more than the model has rows.
    """
    if ids > vocab_size:
        raise UserError(
            f"tokenizer {tokenizer}: token id {ids - 1} is beyond the vocabulary of "
            f"{vocab_size}: set the model's vocabulary size to {ids} or more (of stored weights "
            "by resize_token_embeddings of transformers)"
        )


def _encoder_of_transformers(tokenizer: str) -> Encoder:
    from launcher.data.hub import PythonEncoder, load_from_transformers

    loaded = load_from_transformers(tokenizer)
    end = loaded.eos_token_id if loaded.eos_token_id is not None else loaded.sep_token_id
    if loaded.is_fast:
        return _fast(loaded.backend_tokenizer, end, tokenizer)
    if end is None:
        raise UserError(f"tokenizer {tokenizer} has no token that ends a text: choose another")
    size = max(loaded.get_vocab().values()) + 1
    return PythonEncoder(tokenizer=loaded, vocab_size=size, end_of_text=end, rows=size)


def _fast(tokenizer: Tokenizer, end_of_text: int | None, name: str) -> FastEncoder:
    if end_of_text is None:
        raise UserError(
            f"tokenizer {name} has no token that ends a text: add one of "
            f"{', '.join(_KNOWN_END_TOKENS)} to it, or name one as eos_token in the "
            "tokenizer_config.json beside it"
        )
    # Files saved for inference may truncate or pad texts to the length of a context.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    size = _id_count(tokenizer, name)
    plain = max(tokenizer.get_vocab(with_added_tokens=False).values(), default=0)
    rows = max(plain, end_of_text) + 1
    return FastEncoder(tokenizer=tokenizer, vocab_size=size, end_of_text=end_of_text, rows=rows)


def _id_count(tokenizer: Tokenizer, name: str) -> int:
    """Return the largest id plus one: vocabularies can have holes.

    Raises:
        UserError: two tokens have one id.
    """
    tokens: dict[int, str] = {}
    for token, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if number in tokens:
            raise UserError(
                f"tokenizer {name}: {tokens[number]!r} and {token!r} both have id {number}: save "
                "it again with the tokenizers library"
            )
        tokens[number] = token
    return max(tokens) + 1


def _check_added(document: Mapping[str, Any], loaded: Tokenizer, name: str) -> None:
    # The library gives added tokens the next free ids, whatever ids the file has.
    for token in document.get("added_tokens") or ():
        given = loaded.token_to_id(token["content"])
        if given != token["id"]:
            raise UserError(
                f"tokenizer {name}: added token {token['content']!r} has id {token['id']}, and "
                f"would get {given}: correct the id"
            )
