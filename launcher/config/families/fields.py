"""Fields of a config.json and our options, converted in both directions."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from launcher.model.config import Activation, ModelConfig
from launcher.model.config_checks import MOST_LAYERS, MOST_PER_DIMENSION, spelled_bias
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


class Field(NamedTuple):
    """One or a few fields of a config.json and our options of the same meaning."""

    read: Callable[[ConfigJson], Mapping[str, Any]]
    """Returns arguments of ModelConfig; raises UserError where our model has no such option."""
    write: Callable[[ModelConfig], Mapping[str, Any]] = lambda config: {}
    """Returns fields for a config that is spelled out; the nearest ones if none are equal."""
    theirs: str = ""
    """The name of a single field, and below of our option, where both have the same value."""
    ours: str = ""


def value(
    theirs: str,
    ours: str,
    kind: type[int] | type[float] | type[bool],
    default: Any = None,
    *,
    optional: bool = False,
) -> Field:
    """Return a field with another name and the same value.

    Args:
        default: of transformers where the field is left out; without one it must be there.
        optional: null means what our own default does.
    """

    def read(document: ConfigJson) -> Mapping[str, Any]:
        if optional and document.get(theirs, default) is None:
            return {}
        found = document.value(theirs, kind, default)
        most = MOST_LAYERS if ours == "layers" else MOST_PER_DIMENSION
        if kind is int and not 1 <= found <= most:
            why = f"and shardscale's models have 1 to {most:,}"
            raise document.refusal(theirs, found, why)
        return {ours: found}

    return Field(read, lambda config: {theirs: getattr(config, ours)}, theirs, ours)


def biases(default: bool = False, /, **projections: Sequence[str]) -> Field:
    """Return the fields that say whether projections have biases.

    Args:
        default: of transformers where a field is left out.
        projections: those that each of their fields is about.
    """

    def read(document: ConfigJson) -> Mapping[str, Any]:
        names = [
            name
            for theirs, ours in projections.items()
            if document.value(theirs, bool, default)
            for name in ours
        ]
        return {"bias": spelled_bias(names)}

    def write(config: ModelConfig) -> Mapping[str, Any]:
        return {theirs: config.has_bias(ours[-1]) for theirs, ours in projections.items()}

    return Field(read, write)


def only(theirs: str, supported: Any) -> Field:
    """Return a field that changes the computation, of which our model supports one value, the
    default; null counts as left out."""

    def read(document: ConfigJson) -> Mapping[str, Any]:
        found = document.get(theirs)
        if found is not None and found != supported:
            why = f"and shardscale's model computes only {supported!r}"
            raise document.refusal(theirs, found, why)
        return {}

    return Field(read)


def activation(theirs: str, names: Mapping[str, Activation]) -> Field:
    """Return the field of the activation's name, the first one if it is left out; of several names
    for ours, the first is written."""
    first = next(iter(names))

    def read(document: ConfigJson) -> Mapping[str, Any]:
        name = document.get(theirs, first)
        if name not in tuple(names):  # which may be a list, and not hashable
            known = ", ".join(names)
            raise document.refusal(theirs, name, f"and shardscale's model has only {known}")
        return {"activation": names[name]}

    def write(config: ModelConfig) -> Mapping[str, Any]:
        alike = (name for name, ours in names.items() if ours == config.activation)
        return {theirs: next(alike, first)}

    return Field(read, write)


def dropout(keys: Sequence[str], default: float) -> Field:
    """Return the fields of dropout of embeddings, attention weights and residuals; ours is one
    probability."""

    def read(document: ConfigJson) -> Mapping[str, Any]:
        values: dict[str, float] = {key: document.value(key, float, default) for key in keys}
        first = values[keys[0]]
        if not all(math.isclose(value, first) for value in values.values()):
            shown = ", ".join(f"{key} {value:g}" for key, value in values.items())
            raise UserError(
                f"{document.path}: {shown} differ, and shardscale's model has one dropout: make "
                "them equal there"
            )
        return {"dropout": first}

    return Field(read, lambda config: dict.fromkeys(keys, config.dropout))


def window(default: int | None) -> Field:
    """Return the field of a sliding window on every layer; theirs includes the token itself, ours
    does not, and one that hides nothing is none."""

    def read(document: ConfigJson) -> Mapping[str, Any]:
        found = document.get("sliding_window", default)
        if found is None:
            return {}
        tokens = document.typed("sliding_window", found, int)
        context = document.get("max_position_embeddings")
        return {} if isinstance(context, int) and tokens >= context else {"window": tokens - 1}

    def write(config: ModelConfig) -> Mapping[str, Any]:
        return {"sliding_window": None if config.window is None else config.window + 1}

    return Field(read, write)


def gated_window() -> Field:
    """Return the fields of Qwen's window: a switch, and the first layer that has it. A window on
    some layers only is rejected."""
    plain = window(default=4096)

    def read(document: ConfigJson) -> Mapping[str, Any]:
        switched_on = document.value("use_sliding_window", bool, False)
        first = document.value("max_window_layers", int, 28)
        layers = document.value("num_hidden_layers", int)
        kinds = document.get("layer_types")
        if kinds is None:
            name, value = "max_window_layers", first
            # layers below max_window_layers attend to all tokens
            full, sliding = not switched_on or first > 0, switched_on and first < layers
        elif isinstance(kinds, list) and all(kind in _LAYER_TYPES for kind in kinds):
            name, value = "layer_types", kinds
            full, sliding = (kind in kinds for kind in _LAYER_TYPES)
        else:
            raise document.refusal("layer_types", kinds, f"and only {_LAYER_TYPES} are known")
        if sliding and (full or not switched_on):
            why = f"with use_sliding_window {switched_on}, and ours has one window for all layers"
            raise document.refusal(name, value, why)
        found = plain.read(document)
        return found if sliding else {}

    def write(config: ModelConfig) -> Mapping[str, Any]:
        return {
            "use_sliding_window": config.window is not None,
            **plain.write(config),
            "max_window_layers": config.layers if config.window is None else 0,
        }

    return Field(read, write)
