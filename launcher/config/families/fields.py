"""What a config.json says, field by field, each kind of field in both directions."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from launcher.model.config import Activation, ModelConfig
from launcher.model.config_checks import MOST_LAYERS, MOST_PER_DIMENSION
from launcher.util.errors import UserError

_LAYER_TYPES = ("full_attention", "sliding_attention")
_WORDS = {
    int: f"a whole number up to {MOST_PER_DIMENSION}",
    float: "a number",
    bool: "true or false",
}


class Document:
    """A config.json that remembers which of its fields somebody has read."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The field's value, or what transformers means by leaving it out."""
        self._read.add(key)
        return self.values.get(key, default)

    def value(self, key: str, kind: type[Any], default: Any = None) -> Any:
        """The same, of this type.

        Raises:
            UserError: it is something else.
        """
        return self.typed(key, self.get(key, default), kind)

    def typed(self, name: str, value: Any, kind: type[Any]) -> Any:
        """The value as this type; a whole number is a number too.

        Raises:
            UserError: it is something else.
        """
        accepted = (int, float) if kind is float else kind
        if isinstance(value, accepted) and (kind is bool or not isinstance(value, bool)):
            with contextlib.suppress(OverflowError):
                if kind is not int or abs(value) <= MOST_PER_DIMENSION:
                    return kind(value)
        raise UserError(f"{self.path}: {name} is {value!r}, but must be {_WORDS[kind]}")

    def unread(self) -> Iterator[tuple[str, Any]]:
        """Fields that say something, and that nobody has read."""
        for key, value in self.values.items():
            if value is not None and key not in self._read:
                yield key, value

    def refusal(self, name: str, value: Any, why: str) -> UserError:
        """That the model cannot be imported because of this field."""
        return UserError(f"{self.path}: {name} is {value!r}, {why}: it cannot be imported")


class Field(Protocol):
    """One or a few fields of a config.json and the options of ours that mean the same."""

    def read(self, document: Document) -> Mapping[str, Any]:
        """Arguments of ModelConfig.

        Raises:
            UserError: our model has no such option.
        """

    def write(self, config: ModelConfig) -> Mapping[str, Any]:
        """Fields for a config whose every default is spelled out; the nearest there are."""


@dataclass(frozen=True, slots=True)
class Value:
    """The same value under another name."""

    theirs: str
    ours: str
    kind: type[int] | type[float] | type[bool]
    default: Any = None
    """Of transformers where the field is left out; without one it must be there."""
    optional: bool = False
    """null means what our own default does."""

    def read(self, document: Document) -> Mapping[str, Any]:
        """Checked to be of its kind."""
        if self.optional and document.get(self.theirs, self.default) is None:
            return {}
        found = document.value(self.theirs, self.kind, self.default)
        most = MOST_LAYERS if self.ours == "layers" else MOST_PER_DIMENSION
        if self.kind is int and not 1 <= found <= most:
            why = f"and shardscale's models have 1 to {most:,}"
            raise document.refusal(self.theirs, found, why)
        return {self.ours: found}

    def write(self, config: ModelConfig) -> Mapping[str, Any]:
        """As it is."""
        return {self.theirs: getattr(config, self.ours)}


@dataclass(frozen=True, slots=True)
class Only:
    """A field that changes what is computed, with the one value that our model computes."""

    theirs: str
    value: Any

    def read(self, document: Document) -> Mapping[str, Any]:
        """Refuses any other value; null is none."""
        found = document.get(self.theirs)
        if found is not None and found != self.value:
            raise document.refusal(
                self.theirs, found, f"and shardscale's model computes only {self.value!r}"
            )
        return {}

    def write(self, config: ModelConfig) -> Mapping[str, Any]:
        """Left out: it is the default."""
        return {}


@dataclass(frozen=True, slots=True)
class ActivationName:
    """The name of the activation; the first name of one of ours is the one written."""

    theirs: str
    names: Mapping[str, Activation]

    def read(self, document: Document) -> Mapping[str, Any]:
        """Left out it is the first."""
        name = document.get(self.theirs, next(iter(self.names)))
        if name not in tuple(self.names):  # which may be a list, and not hashable
            known = ", ".join(self.names)
            raise document.refusal(self.theirs, name, f"and shardscale's model has only {known}")
        return {"activation": self.names[name]}

    def write(self, config: ModelConfig) -> Mapping[str, Any]:
        """The first name of ours, or the first of all."""
        alike = (name for name, ours in self.names.items() if ours == config.activation)
        return {self.theirs: next(alike, next(iter(self.names)))}


@dataclass(frozen=True, slots=True)
class Dropout:
    """Probabilities for embeddings, attention weights and residuals, which ours has as one."""

    keys: tuple[str, ...]
    default: float

    def read(self, document: Document) -> Mapping[str, Any]:
        """Refuses probabilities that differ."""
        values: dict[str, float] = {
            key: document.value(key, float, self.default) for key in self.keys
        }
        first = next(iter(values.values()))
        if not all(math.isclose(value, first) for value in values.values()):
            shown = ", ".join(f"{key} {value:g}" for key, value in values.items())
            raise UserError(
                f"{document.path}: {shown} differ, and shardscale's model has one dropout: make "
                "them equal there"
            )
        return {"dropout": first}

    def write(self, config: ModelConfig) -> Mapping[str, Any]:
        """The same for all."""
        return dict.fromkeys(self.keys, config.dropout)


@dataclass(frozen=True, slots=True)
class Window:
    """A sliding window on every layer; theirs counts the token itself, ours those before it."""

    default: int | None

    def read(self, document: Document) -> Mapping[str, Any]:
        """One that hides nothing is none."""
        found = document.get("sliding_window", self.default)
        if found is None:
            return {}
        tokens = document.typed("sliding_window", found, int)
        context = document.get("max_position_embeddings")
        return {} if isinstance(context, int) and tokens >= context else {"window": tokens - 1}

    def write(self, config: ModelConfig) -> Mapping[str, Any]:
        """null where there is none."""
        return {"sliding_window": None if config.window is None else config.window + 1}


@dataclass(frozen=True, slots=True)
class GatedWindow:
    """Qwen's: a switch, and a number of layers from which on layers have the window."""

    def read(self, document: Document) -> Mapping[str, Any]:
        """Refuses a window on some layers only."""
        switched_on = document.value("use_sliding_window", bool, False)
        first = document.value("max_window_layers", int, 28)
        layers = document.value("num_hidden_layers", int)
        kinds = document.get("layer_types")
        if kinds is None:
            name, value = "max_window_layers", first
            full, sliding = not switched_on or first > 0, switched_on and first < layers
        elif isinstance(kinds, list) and all(kind in _LAYER_TYPES for kind in kinds):
            name, value = "layer_types", kinds
            full, sliding = (kind in kinds for kind in _LAYER_TYPES)
        else:
            raise document.refusal("layer_types", kinds, f"and only {_LAYER_TYPES} are known")
        if sliding and (full or not switched_on):
            why = f"with use_sliding_window {switched_on}, and ours has one window for all layers"
            raise document.refusal(name, value, why)
        window = Window(default=4096).read(document)
        return window if sliding else {}

    def write(self, config: ModelConfig) -> Mapping[str, Any]:
        """On all layers or none."""
        return {
            "use_sliding_window": config.window is not None,
            **Window(default=None).write(config),
            "max_window_layers": config.layers if config.window is None else 0,
        }
