"""From a prompt's tokens to the text that follows, and why it ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from launcher.checkpoint.pretrained.loading import Vocabulary
from launcher.model.decode import continuation
from launcher.model.gpt import GPT
from launcher.tools.generate.text import Characters, StopStrings

_TOKENS_BEFORE = 8
"""How much of the prompt the text of its first followers can depend on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What follows a prompt."""

    text: str
    tokens: int
    """How many the model has given, without the one that ends a text."""
    stopped_by: Literal["length", "stop", "end"]
    """The most tokens were reached, a stop string came, or a token that ends a text."""


def complete(
    model: GPT,
    known: Vocabulary,
    prompt: Sequence[int],
    *,
    most: int,
    choose: Callable[[Tensor], int],
    stops: Sequence[str],
    show: Callable[[str], None],
) -> Completion:
    """Go on behind `prompt` with up to `most` tokens; each piece of text is shown as it comes."""
    characters = Characters(known.encoder.decode, prompt[-_TOKENS_BEFORE:])
    before_stop = StopStrings(stops)
    pieces: list[str] = []

    def take(text: str) -> None:
        if text:
            pieces.append(text)
            show(text)

    count = 0
    stopped_by: Literal["length", "stop", "end"] = "length"
    for token in continuation(model, prompt, choose, most=most):
        if token in known.ends:
            stopped_by = "end"
            break
        count += 1
        take(before_stop.add(characters.add(token)))
        if before_stop.found:
            break
    if not before_stop.found:
        take(before_stop.add(characters.rest()))
    if before_stop.found:
        stopped_by = "stop"
    else:
        take(before_stop.rest())
    return Completion(text="".join(pieces), tokens=count, stopped_by=stopped_by)
