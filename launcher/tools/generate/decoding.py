"""Decode a prompt's continuation into text, piece by piece, up to a stop string or an end token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from launcher.checkpoint.pretrained.loading import Vocabulary
from launcher.model.decode import continuation
from launcher.model.foreign.decoder import ForeignDecoder
from launcher.model.gpt import GPT

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_TOKENS_BEFORE = 8
"""Prompt tokens that the text of the first new tokens can depend on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The continuation of a prompt."""

    text: str
    tokens: int
    """New tokens, without the end token."""
    stopped_by: Literal["length", "stop", "end"]
    """The token limit, a stop string, or an end token."""


def complete(
    model: GPT | ForeignDecoder,
    known: Vocabulary,
    prompt: Sequence[int],
    *,
    most: int,
    choose: Callable[[Tensor], int],
    stops: Sequence[str],
    show: Callable[[str], None],
) -> Completion:
    """Continue `prompt` by up to `most` tokens, passing each piece of text to `show`."""
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


class Characters:
    """Incremental detokenizer: emits text in final pieces of whole characters.

    Tokens have no text of their own: a character may take several tokens, and a space may appear
    only between two. Each piece is therefore the text that a token adds after its predecessors,
    held back until it ends with a whole character.

    Args:
        decode: maps a sequence of tokens to text.
        before: tokens before the first one, such as the prompt's last ones.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(before)
        self._said = len(self._tokens)

    def add(self, token: int) -> str:
        """Add a token; returns the text that is now final."""
        self._tokens.append(token)
        new = self._new()
        return "" if new.endswith(_BROKEN) else self._take(new)

    def rest(self) -> str:
        """Return the remaining text, even if it ends within a character."""
        return self._take(self._new())

    def _new(self) -> str:
        known = self._decode(self._tokens[: self._said])
        return self._decode(self._tokens)[len(known) :]

    def _take(self, new: str) -> str:
        del self._tokens[: self._said]
        self._said = len(self._tokens)
        return new


class StopStrings:
    """Filter that passes text up to the first stop string, holding back its possible prefixes."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """Add text; returns the new text that certainly precedes any stop string."""
        text = self._held + piece
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self._held, self.found = "", True
            return text[: min(places)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """Return the text still held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper prefix of `stop`."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if stop.startswith(text[-size:])), 0)
