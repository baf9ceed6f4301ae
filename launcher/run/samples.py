"""What the model writes while it trains: a text every so many steps (`--sample-every`)."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from launcher.config.resolve import Resolved
from launcher.data import Corpus
from launcher.data.tokenizer import Encoder, load_encoder
from launcher.measure.records import SampleRecord
from launcher.run.sampling import Sampler, Sampling
from launcher.strategies.engine import Engine

MOST_TOKENS = 64
SAMPLING = Sampling(temperature=0.8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Texts that begin alike and are drawn alike, so that only the weights tell them apart.

    Each token takes an evaluation of the whole text by all ranks: the one way to ask a model that
    works however it is sharded. Nothing is drawn from the generators of training.
    """

    every: int
    """Steps."""
    encoder: Encoder
    tokens: Sequence[int]
    """Those that begin a text."""
    most: int
    """How many tokens may follow."""
    seed: int

    @classmethod
    def of(cls, resolved: Resolved, corpus: Corpus) -> Self:
        """Return the samples of a run with `--sample-every`, each a new text."""
        loop = resolved.config.loop
        assert loop.sample_every is not None
        encoder = load_encoder(str(corpus.tokenizer_path or resolved.config.data.tokenizer))
        tokens = encoder.encode_prompt("") or [encoder.end_of_text]
        return cls(
            every=loop.sample_every,
            encoder=encoder,
            tokens=tokens,
            most=max(0, min(MOST_TOKENS, resolved.seq_len - len(tokens))),
            seed=loop.seed,
        )

    def take(self, engine: Engine, step: int, device: torch.device) -> SampleRecord:
        """The text after `step`; all ranks call this, and all get one.

        Every rank makes as many evaluations, whatever it has drawn, of one shape: what comes behind
        a token changes nothing for it, and a compiled model is compiled once.
        """
        started = time.perf_counter()
        choose = Sampler(SAMPLING, self.seed)
        text = torch.full((1, len(self.tokens) + self.most), self.encoder.end_of_text)
        text[0, : len(self.tokens)] = torch.tensor(self.tokens)
        for place in range(len(self.tokens), text.size(1)):
            logits = engine.evaluate(text.to(device))
            text[0, place] = choose(logits[0, place - 1])
        drawn = text[0, len(self.tokens) :].tolist()
        if self.encoder.end_of_text in drawn:
            del drawn[drawn.index(self.encoder.end_of_text) :]
        return SampleRecord(
            step=step,
            prompt="",
            text=self.encoder.decode(drawn),
            tokens=len(drawn),
            duration_s=time.perf_counter() - started,
        )
