"""Named sizes: the decoders that people know, by what they are called."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Final

from launcher.model.config import ModelConfig
from launcher.model.names import known_names


def _config(sizes: Mapping[str, Any]) -> ModelConfig:
    """Return a shape of the data; JSON has no tuples."""
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in sizes.items()
    }
    return ModelConfig(**fields)


NAMED: Final[Mapping[str, ModelConfig]] = {
    name: _config(known.sizes) for name, known in known_names().items() if known.sizes is not None
}
"""Names whose shape is one of our own decoder."""
_SAME_SHAPE: Final = frozenset(
    {"meta", "instruct", "chat", "base", "it", "pt", "hf", "bnb", "4bit", "bf16"}
)
"""Words of a hub name that do not change the shape."""
_NEAREST: Final = 3


CUSTOM = "custom"
"""Name of a model all of whose dimensions are given."""
_DIMENSIONS = ("vocab_size", "context", "layers", "heads", "d_model")


def known_name(text: str) -> str | None:
    """Return the named size that `text` means, or None: any capitals, with or without dashes, with
    an organisation of the hub (`Qwen/Qwen3-8B`, `meta-llama/Meta-Llama-3.1-8B-Instruct`)."""
    if text in NAMED or text == CUSTOM:
        return text
    return _by_words().get(_words(text))


def nearest_names(text: str) -> str:
    """Return the named sizes whose names are most like `text`, the most similar first."""
    known = _by_words()
    close = difflib.get_close_matches(_words(text), known, n=2 * _NEAREST, cutoff=0.0)
    *others, last = list(dict.fromkeys(known[words] for words in close))[:_NEAREST]
    return f"{', '.join(others)} and {last}"


def _words(text: str) -> str:
    """Return the part of a name that identifies a shape: `org/Llama-3.1-8B-Instruct` and `llama3.1
    8b` are `llama3.18b`."""
    words = re.split(r"[-_\s]+", text.rpartition("/")[2].lower())
    return "".join(word for word in words if word not in _SAME_SHAPE)


@cache
def _by_words() -> Mapping[str, str]:
    return {
        _words(text): known.name
        for known in known_names().values()
        for text in (known.name, known.hub, *known.also)
        if text
    }


def named(name: str, **overrides: Any) -> ModelConfig:
    """Return a named size with some fields replaced; `custom` takes all from the arguments.

    Raises ValueError for an unknown name, with the nearest ones, or for an impossible shape.
    """
    if name == CUSTOM:
        if missing := [field for field in _DIMENSIONS if field not in overrides]:
            raise ValueError(f"model {CUSTOM} has no sizes of its own; give {', '.join(missing)}.")
        return ModelConfig(**overrides)
    known = known_name(name)
    if known is None:
        raise ValueError(
            f"model {name!r:.80} is unknown: the nearest names are {nearest_names(name)}; for any "
            "other give its config, as hf:ORG/NAME, a folder or a config.json."
        )
    if known not in NAMED:
        raise ValueError(f"model {known} is a config of transformers, which is not taken here.")
    return replace(NAMED[known], **overrides)
