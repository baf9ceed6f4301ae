"""Learned spans of long conversations: the tokens of prefixes, without encoding each prefix."""

import random
from typing import Any

import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from launcher.data.corpus_build import encode
from launcher.data.formats import Document
from launcher.data.tokenizer import FastEncoder

SPECIAL = ["<s>", "<|user|>", "<|user|>s", "<|end|>"]


def encoder_of(pre_tokenizer: Any, normalizer: Any = None, **added: bool) -> FastEncoder:
    tokenizer = Tokenizer(models.BPE(unk_token=None, byte_fallback=False))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = [chr(n) for n in range(32, 127)] + ["\n", "▁", "é"]
    alphabet += pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=["<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(["the other brother bothers them\n" * 9], trainer)
    tokenizer.add_special_tokens([AddedToken(s, special=True, **added) for s in SPECIAL])
    return FastEncoder(tokenizer=tokenizer, vocab_size=600, end_of_text=0, rows=600)


ENCODERS = {
    "bytes": encoder_of(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "prefix": encoder_of(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "first": encoder_of(pre_tokenizers.Metaspace(prepend_scheme="first")),
    "always": encoder_of(pre_tokenizers.Metaspace(prepend_scheme="always")),
    "llama": encoder_of(
        pre_tokenizers.Sequence([]),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    ),
    "spaces": encoder_of(pre_tokenizers.Metaspace(), lstrip=True, rstrip=True),
}


def conversation(draw: random.Random, turns: int) -> Document:
    """Spans that begin and end inside words, at spaces and at special tokens."""
    text, spans = "", []
    for _ in range(turns):
        text += draw.choice(["<s>", "<|user|>", "<|user|>s", " <|end|> ", ""])
        text += draw.choice(["the other", " bro", "ther\n\n", "Café ", "  "])
        begin = len(text)
        text += draw.choice(["bothers ", " them", "\n", "s the", "<|end|>"]) + "x"
        spans.append((begin, len(text)))
        text += draw.choice(["", "<|end|>", "\n"])
    return Document(text, tuple(spans), ends_itself=True)


@pytest.mark.parametrize("name", ENCODERS)
def test_places_are_those_of_whole_prefixes(name: str) -> None:
    encoder, draw = ENCODERS[name], random.Random(0)
    documents = [conversation(draw, turns) for turns in (*range(8), 20)]
    for document, (ids, learned) in zip(documents, encode(encoder, documents), strict=True):
        (whole,) = encoder.encode([document.text])
        assert ids.tolist() == whole
        expected = np.zeros(len(whole), bool)
        for span in document.learned or ():
            prefixes = encoder.encode([document.text[:place] for place in span])
            begin, end = (
                next((n for n, (a, b) in enumerate(zip(whole, p, strict=False)) if a != b), len(p))
                for p in prefixes
            )
            expected[begin:end] = True
        assert learned is not None
        assert learned.tolist() == expected.tolist()


def test_a_long_conversation_is_encoded_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hundred turns it was encoded a hundred times, at once: gigabytes for megabytes."""
    document, encoded = conversation(random.Random(1), 200), []
    whole = FastEncoder.encode

    def count(encoder: FastEncoder, texts: list[str]) -> list[list[int]]:
        encoded.append(sum(map(len, texts)))
        return whole(encoder, texts)

    monkeypatch.setattr(FastEncoder, "encode", count)
    assert list(encode(ENCODERS["bytes"], [document]))
    assert sum(encoded) < 5 * len(document.text)
