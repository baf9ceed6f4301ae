"""What a config.json says, field by field, each kind of field in both directions."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from launcher.errors import UserError
from launcher.model.config import Activation, ModelConfig, RopeScaling

_LAYER_TYPES = ("full_attention", "sliding_attention")
_DEFAULT_THETA = 10_000.0
_FRACTION = "partial_rotary_factor"
_ORIGINAL = "original_max_position_embeddings"
_ROPE_KEYS = {"rope_type", "type", "rope_theta", _FRACTION}
_LLAMA3_KEYS = {"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL}
_WORDS = {int: "a whole number", float: "a number", bool: "true or false"}


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
        return {self.ours: document.value(self.theirs, self.kind, self.default)}

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


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary frequencies: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` of
    4; both are written."""

    def read(self, document: Document) -> Mapping[str, Any]:
        """Refuses all but plain and Llama 3's frequencies."""
        both = (document.get("rope_parameters"), document.get("rope_scaling"))
        name = "rope_scaling" if both[1] else "rope_parameters"
        found = both[1] or both[0] or {}  # transformers 5 gives precedence to the older one
        if not isinstance(found, dict):
            raise document.refusal(name, found, "and not an object")
        theta = found.get("rope_theta", document.get("rope_theta"))
        theta = _DEFAULT_THETA if theta is None else theta
        read = {"rope_theta": document.typed("rope_theta", theta, float)}
        kind = found.get("rope_type", found.get("type", "default"))
        if kind == "llama3":
            read["rope_scaling"] = self._scaling(document, name, found)
        elif kind != "default":
            why = "and shardscale's model has only default and llama3"
            raise document.refusal(f"{name}.rope_type", kind, why)
        for place in (found, {_FRACTION: document.get(_FRACTION)}):
            if place.get(_FRACTION) not in (None, 1):
                why = "and shardscale's model turns whole heads"
                raise document.refusal(_FRACTION, place[_FRACTION], why)
        known = _ROPE_KEYS if kind == "default" else _ROPE_KEYS | _LLAMA3_KEYS
        for key, value in found.items():
            if key not in known and value is not None:
                raise document.refusal(f"{name}.{key}", value, "which shardscale does not know")
        return read

    def _scaling(self, document: Document, name: str, found: Mapping[str, Any]) -> RopeScaling:
        factor, low, high = (
            document.typed(f"{name}.{key}", found.get(key), float)
            for key in ("factor", "low_freq_factor", "high_freq_factor")
        )
        original = found.get(_ORIGINAL, document.get("max_position_embeddings"))
        return factor, low, high, float(document.typed(f"{name}.{_ORIGINAL}", original, int))

    def write(self, config: ModelConfig) -> Mapping[str, Any]:
        """In the words of both versions."""
        scaling: dict[str, Any] | None = None
        if config.rope_scaling is not None:
            factor, low, high, original = config.rope_scaling
            scaling = {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                _ORIGINAL: int(original),
            }
        parameters = {**(scaling or {"rope_type": "default"}), "rope_theta": config.rope_theta}
        return {
            "rope_parameters": parameters,
            "rope_theta": config.rope_theta,
            "rope_scaling": scaling,
        }
