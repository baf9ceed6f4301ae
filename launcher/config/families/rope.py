"""Rotary frequencies of a config.json, which transformers has kept in several places."""

from collections.abc import Mapping
from typing import Any, Final

from launcher.config.families.fields import ConfigJson, Field
from launcher.model.config import ModelConfig, RopeScaling
from launcher.util.errors import UserError

_OBJECTS = ("rope_scaling", "rope_parameters")
_DEFAULT_THETA = 10_000.0
_FRACTION = "partial_rotary_factor"
_ORIGINAL = "original_max_position_embeddings"
_KEYS = {"rope_type", "type", "rope_theta", _FRACTION}
_LLAMA3_KEYS = {"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL}


def _read(document: ConfigJson) -> Mapping[str, Any]:
    """Return our options; reject other frequencies than plain and Llama 3's, and contradictions."""
    objects: dict[str, dict[str, Any]] = {}
    for name in _OBJECTS:
        value = document.get(name)
        if value is not None and not isinstance(value, dict):
            raise document.refusal(name, value, "and not an object")
        if value:
            objects[name] = value
    # Of two, transformers 5 takes the older one.
    name, found = next(iter(objects.items()), ("rope_parameters", {}))
    read: dict[str, Any] = {"rope_theta": _theta(document, objects)}
    kind = _kind(document, name, found)
    if kind == "llama3":
        read["rope_scaling"] = _scaling(document, name, found)
    elif kind != "default":
        why = "and shardscale's model has only default and llama3"
        raise document.refusal(f"{name}.rope_type", kind, why)
    for fraction in (found.get(_FRACTION), document.get(_FRACTION)):
        if fraction is not None and document.typed(_FRACTION, fraction, float) != 1:
            why = "and shardscale's model turns whole heads"
            raise document.refusal(_FRACTION, fraction, why)
    known = _KEYS if kind == "default" else _KEYS | _LLAMA3_KEYS
    for key, value in found.items():
        if key not in known and value is not None:
            raise document.refusal(f"{name}.{key}", value, "which shardscale does not know")
    if len(objects) > 1 and not _alike(*objects.values()):
        why = f"and rope_parameters is {objects['rope_parameters']!r}; keep one of them"
        raise document.refusal("rope_scaling", found, why)
    return read


def _scaling(document: ConfigJson, name: str, found: Mapping[str, Any]) -> RopeScaling:
    factor, low, high = (
        document.typed(f"{name}.{key}", found.get(key), float)
        for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    original = found.get(_ORIGINAL, document.get("max_position_embeddings"))
    return factor, low, high, float(document.typed(f"{name}.{_ORIGINAL}", original, int))


def _write(config: ModelConfig) -> Mapping[str, Any]:
    """Return the fields of both versions."""
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


def _theta(document: ConfigJson, objects: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the base of the frequencies, on which all places must agree."""
    places = {"rope_theta": document.get("rope_theta")}
    places |= {f"{name}.rope_theta": found.get("rope_theta") for name, found in objects.items()}
    given = {
        place: document.typed(place, value, float)
        for place, value in places.items()
        if value is not None
    }
    if len({*given.values()}) > 1:
        shown = " and ".join(f"{place} {value:g}" for place, value in given.items())
        raise UserError(f"{document.path}: {shown} differ: keep one of them")
    theta: float = next(iter(given.values()), _DEFAULT_THETA)
    return theta


def _kind(document: ConfigJson, name: str, found: Mapping[str, Any]) -> Any:
    """Return `rope_type`, which transformers 4 calls `type`."""
    kind = found.get("rope_type", found.get("type", "default"))
    if found.get("type", kind) != kind:
        why = f"and {name}.type is {found['type']!r}; keep one of them"
        raise document.refusal(f"{name}.rope_type", kind, why)
    return kind


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two objects agree, apart from their base."""
    plain = [
        {"rope_type": found.get("type", "default"), **found, "rope_theta": None, "type": None}
        for found in (one, other)
    ]
    keys = {*plain[0], *plain[1]}
    return all(plain[0].get(key) == plain[1].get(key) for key in keys)


ROPE: Final = Field(_read, _write)
"""Rotary frequencies: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` of 4;
both are written."""
