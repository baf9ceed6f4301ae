"""`--model hf:ORG/NAME`, a folder, a config.json or the name of a known shape: the decoder that a
config of transformers describes, computed by our own code or by that of transformers."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from launcher.model.config import ModelConfig
from launcher.model.foreign.config import USERS, ForeignConfig
from launcher.model.names import known_configs
from launcher.model.sizes import known_name, nearest_names
from launcher.util.errors import UserError, naming, refused
from launcher.util.flags import as_flags
from launcher.util.hub_cache import HUB_PREFIX, cached_folder, name_of_folder
from launcher.util.json_file import JsonObject, read_json
from launcher.util.packages import how_to_install

DecoderChoice = str
BY_NAME: Final = ("auto", "own", "transformers")
"""Values of `--decoder`, beside functions of users."""
CONFIG: Final = "config.json"
TOKENIZER: Final = "tokenizer.json"
_CONTEXT: Final = "max_position_embeddings"
_KEPT: Final = frozenset(
    {"attention", "activation_checkpointing", "loss_chunk", "lora", "quantize_base"}
)
"""Options that a decoder of transformers takes, too."""


def is_function(decoder: str) -> bool:
    """Return whether a value of `--decoder` names a function.

    Raises:
        UserError: neither that nor one of the choices.
    """
    if decoder in BY_NAME:
        return False
    module, colon, name = decoder.partition(":")
    if not colon or not name.isidentifier() or not module.replace(".", "").isidentifier():
        raise UserError(
            f"--decoder {decoder!r:.80}: give {', '.join(BY_NAME)}, or a function of your own as "
            "package.module:function"
        )
    return True


def names_config(model: str) -> bool:
    """Return whether a value of `--model` names a config of transformers."""
    if model.startswith(HUB_PREFIX) or model.endswith(".json") or model in known_configs():
        return True
    if "/" not in model:  # a folder here, but for one that is called as a known size
        return known_name(model) is None and (Path(model) / CONFIG).is_file()
    # Qwen/Qwen3-8B is a name of a size, unless there is such a folder.
    return Path(model).expanduser().exists() or known_name(model) is None


def label_of(model: str) -> str:
    """Return its name for tables and folders."""
    if model in known_configs():
        return model
    path = Path(model.removeprefix(HUB_PREFIX))
    return name_of_folder(path.absolute().parent if path.suffix == ".json" else path)


def tokenizer_of(model: str) -> Path | None:
    """Return the tokenizer beside the config that a value of `--model` names, if any."""
    if not names_config(model) or model.removeprefix(HUB_PREFIX) in known_configs():
        return None
    try:
        path = _find(model.removeprefix(HUB_PREFIX)).with_name(TOKENIZER)
    except UserError:  # from_config says why
        return None
    return path if path.is_file() else None


def from_config(model: str, by: DecoderChoice, options: Mapping[str, Any]) -> ModelConfig:
    """Return the decoder of a config.

    Args:
        model: value of `--model`.
        by: whose code computes it.
        options: given fields of ModelConfig, which replace its own.

    Raises:
        UserError: there is no such config, or no decoder for it; ValueError: an impossible option.
    """
    with naming(f"--model {model}:"):
        if (known := known_configs().get(model.removeprefix(HUB_PREFIX))) is not None:
            return _decoder(Path(model), dict(known), by, options)
        return decoder_of(_find(model.removeprefix(HUB_PREFIX)), by, options)


def decoder_of(path: Path, by: DecoderChoice, options: Mapping[str, Any]) -> ModelConfig:
    """Return the decoder of a config.json; arguments and errors as of `from_config`."""
    return _decoder(path, read_json(path, infinite=True), by, options)


def _decoder(
    path: Path, document: JsonObject, by: DecoderChoice, options: Mapping[str, Any]
) -> ModelConfig:
    from launcher.config.families import FAMILIES, family_of

    if by == "own" or (by == "auto" and document.get("model_type") in FAMILIES):
        try:
            family = family_of(document, path)
            config = family.read(document, path)
        except UserError:
            if by == "own":  # with auto, transformers computes it
                raise
        else:
            if "context" in options and _CONTEXT in document:
                # a window that hides something at one context hides nothing at a shorter one
                resized = family.read({**document, _CONTEXT: options["context"]}, path)
                options = {"window": resized.window, **options}
            return dataclasses.replace(config, **options)
    return _foreign(document, options)


def require_own(model: ModelConfig, what: str) -> None:
    """Refuse a decoder of transformers where only our own is known.

    Args:
        what: what is asked of it, as the beginning of a sentence.

    Raises:
        UserError: transformers computes it.
    """
    if isinstance(model, ForeignConfig):
        can = "trained and resumed"
        if USERS not in model.fields:
            can = "trained, resumed and exported for transformers"
        raise UserError(
            f"{what} knows shardscale's own decoder only, and {model.computed_by} computes this "
            f"model: it can be {can}"
        )


def require_transformers(model: ModelConfig, what: str) -> None:
    """Refuse a user's decoder where only those of transformers and our own are known.

    Raises:
        UserError: a user's function builds it.
    """
    if isinstance(model, ForeignConfig) and USERS in model.fields:
        raise UserError(
            f"{what} knows decoders of shardscale and transformers only, and {model.architecture} "
            "builds this one: it can be trained, planned and resumed"
        )


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options that a decoder of others takes, and those given ones that it does not."""
    given = {name: value for name, value in options.items() if name not in _KEPT}
    return {name: value for name, value in options.items() if name in _KEPT}, given


def _foreign(document: JsonObject, options: Mapping[str, Any]) -> ModelConfig:
    kept, given = split_options(options)
    if given:
        raise UserError(
            f"{as_flags(given)} knows shardscale's own decoder only, and transformers computes "
            "this model: leave it out, or change its config.json"
        )
    with refused(ImportError, f"needs the library transformers: {how_to_install('hf')}"):
        from launcher.model.foreign.reading import foreign_config
    return foreign_config(document, **kept)


def _find(name: str) -> Path:
    """Return the config.json of a folder, or of a model on the Hub."""
    path = Path(name).expanduser()
    if path.is_dir():
        path /= CONFIG
    if path.exists():
        return path
    # a path, not ORG/NAME
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or path.suffix == ".json":
        raise UserError(
            f"there is no file {path}, give a folder with a {CONFIG}, that file, or hf:ORG/NAME"
        )
    try:
        path = cached_folder(name) / CONFIG
        if not path.exists():
            raise UserError(f"has no {CONFIG}")
    except UserError as error:
        raise UserError(f"{error}, or give a known shape, such as {nearest_names(name)}") from None
    return path
