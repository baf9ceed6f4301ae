"""Fields of a config.json and our options, converted in both directions."""

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


class ConfigJson:
    """A config.json that tracks which of its fields have been read."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the field's value, or transformers' default, and mark it as read."""
        self._read.add(key)
        return self.values.get(key, default)

    def value(self, key: str, kind: type[Any], default: Any = None) -> Any:
        """Return the field's value, checked to be of this type.

        Raises:
            UserError: it is something else.
        """
        return self.typed(key, self.get(key, default), kind)

    def typed(self, name: str, value: Any, kind: type[Any]) -> Any:
        """Return the value as this type; a whole number is also a float.

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
        """Yield the fields with a value that were not read."""
        for key, value in self.values.items():
            if value is not None and key not in self._read:
                yield key, value

    def refusal(self, name: str, value: Any, why: str) -> UserError:
        """Return the error that rejects the model because of this field."""
        return UserError(f"{self.path}: {name} is {value!r}, {why}: it cannot be imported")


class Field(Protocol):
    """One or a few fields of a config.json and our options of the same meaning."""

    def read(self, document: ConfigJson) -> Mapping[str, Any]:
        """Return arguments of ModelConfig.

        Raises:
            UserError: our model has no such option.
        """

    def write(self, config: ModelConfig) -> Mapping[str, Any]:
        """Return fields for a config that is spelled out; the nearest ones if none are equal."""


@dataclass(frozen=True, slots=True)
class Value:
    """A field with another name and the same value."""

    theirs: str
    ours: str
    kind: type[int] | type[float] | type[bool]
    default: Any = None
    """Of transformers where the field is left out; without one it must be there."""
    optional: bool = False
    """null means what our own default does."""

    def read(self, document: ConfigJson) -> Mapping[str, Any]:
        """Return the value, checked to be of its kind."""
        if self.optional and document.get(self.theirs, self.default) is None:
            return {}
        found = document.value(self.theirs, self.kind, self.default)
        most = MOST_LAYERS if self.ours == "layers" else MOST_PER_DIMENSION
        if self.kind is int and not 1 <= found <= most:
            why = f"and shardscale's models have 1 to {most:,}"
            raise document.refusal(self.theirs, found, why)
        return {self.ours: found}

    def write(self, config: ModelConfig) -> Mapping[str, Any]:
        """Return the value unchanged."""
        return {self.theirs: getattr(config, self.ours)}


@dataclass(frozen=True, slots=True)
class Only:
    """A field that changes the computation, of which our model supports one value."""

    theirs: str
    value: Any

    def read(self, document: ConfigJson) -> Mapping[str, Any]:
        """Reject any other value; null counts as left out."""
        found = document.get(self.theirs)
        if found is not None and found != self.value:
            raise document.refusal(
                self.theirs, found, f"and shardscale's model computes only {self.value!r}"
            )
        return {}

    def write(self, config: ModelConfig) -> Mapping[str, Any]:
        """Return nothing: the value is the default."""
        return {}


@dataclass(frozen=True, slots=True)
class ActivationName:
    """The activation's name; of several names for ours, the first is written."""

    theirs: str
    names: Mapping[str, Activation]

    def read(self, document: ConfigJson) -> Mapping[str, Any]:
        """Return our activation; the first one if the field is left out."""
        name = document.get(self.theirs, next(iter(self.names)))
        if name not in tuple(self.names):  # which may be a list, and not hashable
            known = ", ".join(self.names)
            raise document.refusal(self.theirs, name, f"and shardscale's model has only {known}")
        return {"activation": self.names[name]}

    def write(self, config: ModelConfig) -> Mapping[str, Any]:
        """Return the first name of ours, or the first of all."""
        alike = (name for name, ours in self.names.items() if ours == config.activation)
        return {self.theirs: next(alike, next(iter(self.names)))}


@dataclass(frozen=True, slots=True)
class Dropout:
    """Dropout of embeddings, attention weights and residuals; ours is one probability."""

    keys: tuple[str, ...]
    default: float

    def read(self, document: ConfigJson) -> Mapping[str, Any]:
        """Return the probability; reject different ones."""
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
        """Return the same probability for each field."""
        return dict.fromkeys(self.keys, config.dropout)


@dataclass(frozen=True, slots=True)
class Window:
    """A sliding window on every layer; theirs includes the token itself, ours does not."""

    default: int | None

    def read(self, document: ConfigJson) -> Mapping[str, Any]:
        """Return the window; one that hides nothing is none."""
        found = document.get("sliding_window", self.default)
        if found is None:
            return {}
        tokens = document.typed("sliding_window", found, int)
        context = document.get("max_position_embeddings")
        return {} if isinstance(context, int) and tokens >= context else {"window": tokens - 1}

    def write(self, config: ModelConfig) -> Mapping[str, Any]:
        """Return the window, or null."""
        return {"sliding_window": None if config.window is None else config.window + 1}


@dataclass(frozen=True, slots=True)
class GatedWindow:
    """Qwen's window: a switch, and the first layer that has it."""

    def read(self, document: ConfigJson) -> Mapping[str, Any]:
        """Return the window; reject one on some layers only."""
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
        """Return a window on all layers, or on none."""
        return {
            "use_sliding_window": config.window is not None,
            **Window(default=None).write(config),
            "max_window_layers": config.layers if config.window is None else 0,
        }
