"""adapter_config.json of PEFT: every field checked, and the settings of one module."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from launcher.config.init_from import ADAPTER_CONFIG
from launcher.model.lora_config import MOST_RANK
from launcher.util.errors import WHY, UserError, refused
from launcher.util.json_file import JsonObject, read_json

MOST_ALPHA: Final = 1e6
# Settings that make an adapter compute something else than ours, and their values that do not.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # The others change the base's weights, too.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    **dict.fromkeys(("use_dora", "lora_bias", "use_qalora"), (False, None)),
    **dict.fromkeys(("modules_to_save", "target_parameters"), (None, [])),
    **dict.fromkeys(
        (
            *("trainable_token_indices", "layer_replication", "alora_invocation_tokens"),
            *("velora_config", "monteclora_config", "use_bdlora", "arrow_config", "kasa_config"),
            *("lora_ga_config", "corda_config", "megatron_config"),
        ),
        (None,),
    ),
}
_HARMLESS: Final = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("megatron_core", "qalora_group_size", "loftq_config", "eva_config", "runtime_config"),
}
_PLAIN_NAME = re.compile(r"[\w.]+")
_LAYER = re.compile(r"(?:.*?\.)?(?P<name>[^.]+)\.(?P<number>\d+)\.")
_MOST_PATTERN = 1000
_MOST_REPEATS = 4
"""In a pattern of names: more of them can take minutes to match nothing."""


def _is_whole(value: object, least: int = 0, most: int = 2**31) -> bool:
    return type(value) is int and least <= value <= most


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and name for name in value)


def _is_alpha(value: Any) -> bool:
    return _is_number(value) and 1 / MOST_ALPHA <= value <= MOST_ALPHA


def _is_rank(value: object) -> bool:
    return _is_whole(value, 1, MOST_RANK)


def _is_table(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(of, value.values()))


_FLAG: Final = (lambda v: isinstance(v, bool), "true or false")
_KINDS: Mapping[str, tuple[Callable[[Any], bool], str, Any]] = {
    "r": (_is_rank, f"a whole number from 1 to {MOST_RANK}", 8),
    "lora_alpha": (_is_alpha, f"a number from {1 / MOST_ALPHA:g} to {MOST_ALPHA:g}", 8),
    "lora_dropout": (lambda v: _is_number(v) and 0 <= v < 1, "a number from 0 to below 1", 0.0),
    "use_rslora": (*_FLAG, False),
    "fan_in_fan_out": (*_FLAG, False),  # PEFT sets it right by the layer's own type
    "inference_mode": (*_FLAG, False),
    "ensure_weight_tying": (*_FLAG, False),
    "target_modules": (
        lambda v: v and (isinstance(v, str) or _are_names(v)),
        "a list of names, a pattern or all-linear",
        None,
    ),
    "exclude_modules": (
        lambda v: isinstance(v, str) or _are_names(v),
        "a list of names or a pattern",
        [],
    ),
    "layers_to_transform": (
        lambda v: _is_whole(v) or (isinstance(v, list) and all(map(_is_whole, v))),
        "a number of a layer or a list of them",
        [],
    ),
    "layers_pattern": (lambda v: isinstance(v, str) or _are_names(v), "a list of names", []),
    "rank_pattern": (lambda v: _is_table(v, _is_rank), "an object of ranks", {}),
    "alpha_pattern": (
        lambda v: _is_table(v, _is_alpha),
        f"an object of numbers from {1 / MOST_ALPHA:g} to {MOST_ALPHA:g}",
        {},
    ),
}
"""Field -> check of a value, its description, its default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """A checked adapter_config.json."""

    path: Path
    values: JsonObject
    """By name, defaults included."""

    @classmethod
    def read(cls, folder: Path) -> "Settings":
        """Read the settings in a folder that PEFT's save_pretrained has written.

        Raises:
            UserError: it is damaged, or a value makes the adapter compute something else than ours.
        """
        path = folder / ADAPTER_CONFIG
        document = read_json(path)
        for name, allowed in _ONLY.items():
            value = document.get(name, allowed[0])
            # 1 == True in Python, so that types are compared, too.
            if not any(type(value) is type(one) and value == one for one in allowed):
                raise UserError(
                    f"{path}: {name} is {value!r}, and shardscale's adapters compute only "
                    f"{allowed[0]!r}: it cannot be imported"
                )
        values = {name: _checked(document, name, path) for name in _KINDS}
        known = {*_ONLY, *_KINDS, *_HARMLESS}
        for name, value in document.items():
            if name not in known and value not in (None, False, [], {}):
                raise UserError(
                    f"{path}: {name} is {value!r}, a field that shardscale does not know: take it "
                    "out if it changes nothing"
                )
        for name in ("rank_pattern", "alpha_pattern"):
            for key in values[name]:
                if not _PLAIN_NAME.fullmatch(key):
                    raise UserError(
                        f"{path}: {name} has {key!r}, which is no name of a module: spell out the "
                        "modules that it stands for"
                    )
        return cls(path=path, values=values)

    def refuses(self, module: str) -> str | None:
        """Return the field that excludes a module, or None if it has an adapter."""
        if self.values["exclude_modules"] and _matches(self._names("exclude_modules"), module):
            return "exclude_modules"
        targets = self._names("target_modules")
        if not _matches(targets, module):
            return "target_modules"
        layers = self.values["layers_to_transform"]
        if layers == [] or not isinstance(targets, list):
            return None
        layer, patterns = _LAYER.match(module), self.values["layers_pattern"]
        named = [patterns] if isinstance(patterns, str) else patterns
        if layer is None or (any(named) and layer["name"] not in named):
            return "layers_pattern"
        chosen = layers if isinstance(layers, list) else [layers]
        return None if int(layer["number"]) in chosen else "layers_to_transform"

    def rank_of(self, module: str) -> tuple[str, int]:
        """Return the field that sets a module's rank, and the rank."""
        return self._of(module, "rank_pattern", "r")

    def scale_of(self, module: str, rank: int) -> float:
        """Return the scale of a module's adapter."""
        return float(self._of(module, "alpha_pattern", "lora_alpha")[1]) / self.growth(rank)

    def growth(self, rank: int) -> float:
        """Return the divisor of alpha."""
        return math.sqrt(rank) if self.values["use_rslora"] else float(rank)

    def _of(self, module: str, patterns: str, field: str) -> tuple[str, Any]:
        for key, value in self.values[patterns].items():
            if f".{module}".endswith(f".{key}"):
                return f"{patterns}.{key}", value
        return field, self.values[field]

    def _names(self, field: str) -> list[str] | re.Pattern[str] | None:
        """Names, a pattern, or None for every projection."""
        value = self.values[field]
        if isinstance(value, list):
            return value
        if field == "target_modules" and value.lower() == "all-linear":
            return None
        # Python's `re` cannot be interrupted.
        repeats = len(re.findall(r"[*+{]", value))
        if len(value) > _MOST_PATTERN or repeats > _MOST_REPEATS or re.search(r"\)[*+{]", value):
            raise UserError(
                f"{self.path}: {field} is {value!r}, a pattern that can take minutes to match: "
                "write the list of the names that it stands for"
            )
        said = f"{self.path}: {field} is {value!r}, which is no pattern ({WHY})"
        with refused((re.error, RecursionError, OverflowError), f"{said}: write a list of names"):
            return re.compile(value)


def _checked(document: JsonObject, name: str, path: Path) -> Any:
    fits, words, default = _KINDS[name]
    value = document.get(name, default)
    if value is None and default in ([], {}):
        return default
    if not fits(value):
        raise UserError(
            f"{path}: {name} is {value!r}, but must be {words}: save it again with PEFT"
        )
    return value


def _matches(names: Sequence[str] | re.Pattern[str] | None, module: str) -> bool:
    """Match as PEFT does: a name against the end of a module's, a pattern against all of it."""
    if names is None:
        return True
    if isinstance(names, re.Pattern):
        return names.fullmatch(module) is not None
    return any(f".{module}".endswith(f".{name}") for name in names)
