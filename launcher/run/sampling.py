"""How the next token is chosen from the logits: the likeliest, or one drawn with a seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from launcher.util.errors import UserError
from launcher.util.flags import MOST_NUMBER, require_range


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """What is drawn from.

    Raises:
        UserError: a value that nothing can be drawn with.
    """

    temperature: float = 0.0
    """Logits are divided by it; 0 takes the likeliest token."""
    top_k: int | None = None
    """Draw among so many likeliest tokens only."""
    top_p: float | None = None
    """Draw among the fewest likeliest tokens that have this probability together."""

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


class Sampler:
    """Chooses one token after the other; on every device the same seed draws the same numbers."""

    def __init__(self, sampling: Sampling, seed: int) -> None:
        self._sampling = sampling
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits: Tensor) -> int:
        """The next token for logits [V]."""
        if self._sampling.temperature == 0:
            return int(logits.argmax())
        drawn = torch.multinomial(
            probabilities(logits.cpu(), self._sampling), 1, generator=self._generator
        )
        return int(drawn)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probability of each token, logits [V] -> fp32 [V]; the temperature is above 0."""
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
