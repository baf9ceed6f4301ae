"""Families of transformers: their configs read as ours, and the family that computes a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from launcher.config.families.architectures import ARCHITECTURES
from launcher.config.families.base import Family, Part, differences, spelled_out
from launcher.model.config import ModelConfig
from launcher.model.config_checks import biased
from launcher.util.errors import UserError
from launcher.util.json_file import read_json

__all__ = ["FAMILIES", "Family", "Part", "family_for", "family_of", "read_hf_config", "spelled_out"]

FAMILIES: Final[Mapping[str, Family]] = {family.model_type: family for family in ARCHITECTURES}


def read_hf_config(path: Path) -> ModelConfig:
    """Return our model for a config.json of transformers; needs no weights.

    `path` is the file, or the folder that it is in.

    Raises:
        UserError: it cannot be read, or describes something that our model does not compute.
    """
    path = path / "config.json" if path.is_dir() else path
    document = read_json(path)
    return family_of(document, path).read(document, path)


def family_of(document: Mapping[str, Any], path: Path) -> Family:
    """Return the family that a config.json names; `path` is for the messages.

    Raises:
        UserError: none of ours.
    """
    if document.get("auto_map") is not None:
        raise UserError(
            f"{path}: auto_map is {document['auto_map']!r}, code that comes with the model, which "
            "is never run: it cannot be imported"
        )
    model_type = document.get("model_type")
    if model_type not in tuple(FAMILIES):
        raise UserError(
            f"{path}: model_type is {model_type!r}, and only {', '.join(FAMILIES)} can be "
            "imported; --init-from with --decoder auto trains others, computed by transformers"
        )
    return FAMILIES[model_type]


def family_for(config: ModelConfig) -> tuple[Family, ModelConfig]:
    """Return the family that computes this model, and its own form of it, perhaps with more biases,
    all 0.

    Raises:
        UserError: no family computes the same.
    """
    mine = spelled_out(config)
    found = [(family, family.nearest(mine)) for family in FAMILIES.values()]
    candidates = [(family, theirs) for family, theirs in found if theirs is not None]
    # With as few differences as there are, and then with as few biases.
    family, theirs = min(
        candidates, key=lambda pair: (len(differences(mine, pair[1])), len(biased(pair[1].bias)))
    )
    if differing := differences(mine, theirs):
        here, there = (
            ", ".join(f"{name} {getattr(one, name)}" for name in differing)
            for one in (mine, theirs)
        )
        raise UserError(
            f"{here}: transformers has no such model ({family.architecture}, the nearest, has "
            f"{there}), so this one would compute something else there; use --format safetensors"
        )
    return family, theirs
