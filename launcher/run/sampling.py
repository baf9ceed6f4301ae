"""Sampling of tokens, and the texts that a run with `--sample-every` writes while it trains."""

import itertools
import time
from collections.abc import Callable, Sequence
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


def token_sampler(sampling: Sampling, seed: int) -> Callable[[Tensor], int]:
    """Return a function that draws the next token for logits [V], call by call; the same seed draws
    the same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)

    def draw(logits: Tensor) -> int:
        if sampling.temperature == 0:
            return int(logits.argmax())
        chances = probabilities(logits.cpu(), sampling)
        return int(torch.multinomial(chances, 1, generator=generator))

    return draw


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
FREE, ANSWER = Sampling(temperature=0.8), Sampling()
"""Texts from nothing are drawn; answers are greedy, so that they differ only as the weights do."""
PROMPTS = 2
LEAST_TOKENS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Texts with the same beginnings and seed, so that only the weights differ.

    Each token takes an evaluation of the whole texts by all ranks, which works for every sharding.
    The generators of training are not used.
    """

    encoder: Encoder
    prompts: Sequence[Sequence[int]]
    """Tokens that each text begins with."""
    ends: frozenset[int]
    """Tokens that end a text."""
    most: int
    """Tokens that are generated at most."""
    sampling: Sampling
    seed: int

    @classmethod
    def of(cls, resolved: Resolved, corpus: Corpus) -> Self:
        """Return answers to the first different prompts of the validation split, or texts from
        nothing where the data has no prompts that leave room for an answer."""
        encoder = load_encoder(str(corpus.tokenizer_path or resolved.config.data.tokenizer))
        room = resolved.seq_len - LEAST_TOKENS
        shown = [each for each in corpus.validation_documents if 0 < each.prompt_tokens <= room]
        begun = (tuple(each.tokens[: each.prompt_tokens].tolist()) for each in shown)
        prompts: list[tuple[int, ...]] = list(dict.fromkeys(begun))[:PROMPTS]
        # The last token of a document ends its answer, with any chat template.
        ends = frozenset({encoder.end_of_text, *(int(each.tokens[-1]) for each in shown)})
        sampling = ANSWER if prompts else FREE
        prompts = prompts or [tuple(encoder.encode_prompt("") or [encoder.end_of_text])]
        return cls(
            encoder=encoder,
            prompts=prompts,
            ends=ends,
            most=max(0, min(MOST_TOKENS, resolved.seq_len - max(map(len, prompts)))),
            sampling=sampling,
            seed=resolved.config.loop.seed,
        )

    def take(self, engine: Engine, step: int, device: torch.device) -> list[SampleRecord]:
        """Generate the texts after `step`; all ranks call this.

        All evaluations have one shape, so that a compiled model is compiled once, and every rank
        makes equally many, whatever it has drawn.
        """
        started = time.perf_counter()
        choose = token_sampler(self.sampling, self.seed)
        widest = max(map(len, self.prompts))
        # What follows a token has no effect on it: shorter texts are filled up at their end.
        texts = torch.full((len(self.prompts), widest + self.most), self.encoder.end_of_text)
        for text, prompt in zip(texts, self.prompts, strict=True):
            text[: len(prompt)] = torch.tensor(prompt)
        for number in range(self.most):
            logits = engine.evaluate(texts.to(device))
            for row, prompt in enumerate(self.prompts):
                place = len(prompt) + number
                texts[row, place] = choose(logits[row, place - 1])
        duration_s = time.perf_counter() - started
        return [
            self._record(text.tolist(), prompt, step, duration_s)
            for text, prompt in zip(texts, self.prompts, strict=True)
        ]

    def _record(
        self, text: Sequence[int], prompt: Sequence[int], step: int, duration_s: float
    ) -> SampleRecord:
        drawn = text[len(prompt) : len(prompt) + self.most]
        kept = list(itertools.takewhile(lambda token: token not in self.ends, drawn))
        return SampleRecord(
            step=step,
            # With special tokens, so that a wrong template is seen.
            prompt=self.encoder.decode(prompt, special=True) if self.sampling is ANSWER else "",
            text=self.encoder.decode(kept),
            tokens=len(kept),
            duration_s=duration_s,
        )
