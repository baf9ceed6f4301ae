"""`--decoder package.module:function`: a decoder that a user's function builds from a config."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from launcher.config.transformers_config import split_options
from launcher.model.config import ModelConfig
from launcher.util.errors import UserError, naming
from launcher.util.json_file import read_json

_NO_FILE: Final = "nano"
"""The default of `--model`."""


def from_function(model: str, decoder: str, options: Mapping[str, Any]) -> ModelConfig:
    """Return the decoder of a user's function.

    Args:
        model: value of `--model`: a JSON file with fields of its config.
        decoder: the function.
        options: given fields of ModelConfig; dimensions are fields of its config.

    Raises:
        UserError: it cannot be imported, built or trained.
    """
    kept, fields = split_options(options)
    with naming(f"--decoder {decoder}:"):
        if "lora" in kept or kept.get("attention", "auto") != "auto":
            flag = "--lora-rank" if "lora" in kept else f"--attention {kept['attention']}"
            raise UserError(f"{flag} knows shardscale's own decoder only: leave it out")
        if model != _NO_FILE:
            if not model.endswith(".json"):
                raise UserError(
                    f"--model {model} is no JSON file: give one with fields of its config, or "
                    "leave --model out"
                )
            own = read_json(Path(model), what="a JSON file with fields of its config")
            fields = {**own, **fields}
        from launcher.model.foreign.users import users_config

        return users_config(decoder, fields, **{**kept, "attention": "eager"})
