"""Tokens back to text as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_BROKEN = "\N{REPLACEMENT CHARACTER}"


class Characters:
    """The text of a growing sequence of tokens, in pieces that stay as they are.

    A tokenizer gives a text to a sequence and not to a token: a character may take several tokens,
    and a space be written only between two. So each piece is what one more token adds to the text
    of those around it, and waits until it ends with a whole character.

    Args:
        decode: the text of a sequence of tokens.
        before: tokens that come before the first one, such as the prompt's last ones.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(before)
        self._said = len(self._tokens)

    def add(self, token: int) -> str:
        """What is certain now and was not before."""
        self._tokens.append(token)
        new = self._new()
        return "" if new.endswith(_BROKEN) else self._take(new)

    def rest(self) -> str:
        """What is left at the end, be it a whole character or not."""
        return self._take(self._new())

    def _new(self) -> str:
        known = self._decode(self._tokens[: self._said])
        return self._decode(self._tokens)[len(known) :]

    def _take(self, new: str) -> str:
        del self._tokens[: self._said]
        self._said = len(self._tokens)
        return new


class StopStrings:
    """Lets text through up to the first of `stops`; what may become one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """What of the text so far is before any stop string, and was not given before."""
        text = self._held + piece
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self._held, self.found = "", True
            return text[: min(places)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """What was held back and is no stop string after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`, but not all of it."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if stop.startswith(text[-size:])), 0)
