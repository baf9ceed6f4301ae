"""What can become of a key in a DeepSpeed file, and what its value must be. A key is one of

- adopted: it is one of our own fields, and the file is a source of its value;
- passed: DeepSpeed gets it as it is; proven by losses equal to those without it;
- idle: without effect here, because shardscale does that itself; said when it is switched on;
- refused: switched on it would train otherwise than it says; the sentence names the way out.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

AUTO = "auto"
"""As if the key were not there."""
LARGEST = 2**62  # DeepSpeed counts in int64

Kind = Literal[
    "flag",
    "stage",
    "count",
    "even",
    "size",
    "power",
    "number",
    "text",
    "pair",
    "device",
    "type",
    "any",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """What becomes of one key."""

    kind: Kind
    fate: Literal["adopted", "passed", "idle", "refused"]
    field: str = ""
    """The field of RunConfig that an adopted key is; "" where several keys make one field."""
    why: str = ""
    """Who does it instead, or the way out."""
    harmless: tuple[object, ...] = ()
    """Values of an idle or refused key that change nothing. Those that switch a thing off do not
    either, unless True is the value that changes nothing."""

    def is_harmless(self, value: object) -> bool:
        """Whether an idle or refused key's value asks for what happens anyway."""
        return value in self.harmless or (is_off(value) and True not in self.harmless)


def adopted(kind: Kind, field: str = "") -> Key:
    """A source of one of our fields."""
    return Key(kind=kind, fate="adopted", field=field)


def passed(kind: Kind) -> Key:
    """For DeepSpeed as it is."""
    return Key(kind=kind, fate="passed")


def idle(why: str = "", *harmless: object) -> Key:
    """Without effect."""
    return Key(kind="any", fate="idle", why=why, harmless=harmless)


def refused(why: str, *harmless: object) -> Key:
    """Not possible, unless it asks for nothing."""
    return Key(kind="any", fate="refused", why=why, harmless=harmless)


def is_off(value: object) -> bool:
    """Whether a section or switch asks for nothing."""
    if isinstance(value, dict):
        if "enabled" in value:
            return is_off(value["enabled"])
        return all(map(is_off, value.values()))
    return value in (None, False, 0, "", "none", AUTO) or value == []


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: Any, least: int) -> bool:
    return _finite(value) and value == int(value) and least <= value <= LARGEST


KINDS: Mapping[Kind, tuple[Callable[[Any], bool], str]] = {
    "flag": (lambda v: isinstance(v, bool), "true or false"),
    "stage": (lambda v: type(v) is int and v in (0, 1, 2, 3), "0, 1, 2 or 3"),
    "count": (lambda v: _whole(v, 1), "a whole number of at least 1"),
    "even": (lambda v: _whole(v, 0) and v % 2 == 0, "an even whole number"),
    "size": (lambda v: _whole(v, 0), "a whole number of at least 0"),
    "power": (lambda v: _whole(v, 0) and v <= 62, "a whole number from 0 to 62"),
    "number": (_finite, "a number"),
    "text": (lambda v: isinstance(v, str) and v != "", "text"),
    "pair": (lambda v: isinstance(v, list) and len(v) == 2 and all(map(_finite, v)), "two numbers"),
    "device": (lambda v: v in ("none", "cpu", "nvme"), "none, cpu or nvme"),
    "type": (lambda v: v in ("fp32", "bf16"), "fp32 or bf16"),
    "any": (lambda v: True, ""),
}
"""kind -> whether a value is one, and in words what it must be."""
