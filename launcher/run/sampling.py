"""Sampling of tokens, and the texts that a run with `--sample-every` writes while it trains."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from launcher.config.resolve import Resolved
from launcher.data import Corpus
from launcher.data.tokenizer import Encoder, load_encoder
from launcher.measure.records import SampleRecord
from launcher.strategies.engine import Engine
from launcher.util.errors import UserError
from launcher.util.flags import MOST_NUMBER, require_range


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Temperature and truncation of the next token's distribution.

    Raises:
        UserError: a value out of range, or truncation without a temperature.
    """

    temperature: float = 0.0
    """Logits are divided by it; 0 takes the likeliest token."""
    top_k: int | None = None
    """Draw among this many likeliest tokens."""
    top_p: float | None = None
    """Draw among the fewest likeliest tokens whose probabilities sum to this."""

    def __post_init__(self) -> None:
        require_range("--temperature", self.temperature, 0, MOST_NUMBER)
        require_range("--top-k", self.top_k, 1, MOST_NUMBER)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"--top-p {self.top_p} must be more than 0 and at most 1")
        for name, value in (("--top-k", self.top_k), ("--top-p", self.top_p)):
            if value is not None and self.temperature == 0:
                raise UserError(
                    f"{name} {value} needs a --temperature above 0: at 0 the likeliest token is "
                    "taken and none is drawn"
                )


class TokenSampler:
    """Draws one token after the other; the same seed draws the same numbers on every device."""

    def __init__(self, sampling: Sampling, seed: int) -> None:
        self._sampling = sampling
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits: Tensor) -> int:
        """Return the next token for logits [V]."""
        if self._sampling.temperature == 0:
            return int(logits.argmax())
        drawn = torch.multinomial(
            probabilities(logits.cpu(), self._sampling), 1, generator=self._generator
        )
        return int(drawn)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return each token's probability, fp32 [V], for logits [V]; the temperature is above 0."""
    logits = logits.float()
    # From the largest down: the division may overflow, and its differences must not be NaN.
    logits = (logits - logits.max()) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(logits):
        least = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    chances = logits.softmax(0)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, tokens = chances.sort(descending=True, stable=True)
        likelier = ordered.cumsum(0) - ordered  # than this token, all together
        chances = chances.index_fill(0, tokens[likelier >= sampling.top_p], 0.0)
        chances = chances / chances.sum()
    return chances


MOST_TOKENS = 64
SAMPLING = Sampling(temperature=0.8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Texts with the same beginning and seed, so that only the weights differ.

    Each token takes an evaluation of the whole text by all ranks, which works for every sharding.
    The generators of training are not used.
    """

    every: int
    """Steps."""
    encoder: Encoder
    tokens: Sequence[int]
    """Beginning of each text."""
    most: int
    """Tokens that are generated at most."""
    seed: int

    @classmethod
    def of(cls, resolved: Resolved, corpus: Corpus) -> Self:
        """Return the samples of a run with `--sample-every`."""
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
        """Generate the text after `step`; all ranks call this.

        All evaluations have one shape, so that a compiled model is compiled once, and every rank
        makes equally many, whatever it has drawn.
        """
        started = time.perf_counter()
        choose = TokenSampler(SAMPLING, self.seed)
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
