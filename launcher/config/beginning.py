"""`--init-from`: shape and tokenizer of what a run begins with, in the words of RunConfig."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from launcher.config.model import CHANGES_ADAPTERS, LORA, ModelChoice, adapter_flags
from launcher.config.schema import RunConfig
from launcher.model.config import WHAT_IT_COMPUTES, ModelConfig
from launcher.model.sizes import CUSTOM, NAMED
from launcher.util.errors import UserError, naming
from launcher.util.flags import as_flags, flag

HF_CONFIG: Final = "config.json"
ADAPTER_CONFIG: Final = "adapter_config.json"
_RUN_CONFIG = "config.yaml"
_TOKENIZER = "tokenizer.json"


ReadConfig = Callable[[Path], Mapping[str, Any]]
"""Of a file of `--config`: its fields, typed and checked."""


def adopt(config: RunConfig, read_config: ReadConfig) -> RunConfig:
    """The config with the shape of the model that it begins with, and its tokenizer where no other
    is given.

    Raises:
        UserError: there is no model in the folder, or flags ask for another.
    """
    folder = config.model.init_from
    if folder is None:
        return config
    with naming("--init-from"):
        model = model_in(folder, read_config)
    own = model.computes()
    _check_adapters(config, model)
    for name in WHAT_IT_COMPUTES:
        given = getattr(config.model, name)
        if given not in (None, own[name]) and not _only_a_limit(name, model):
            raise UserError(
                f"{flag(name)} {given} differs from --init-from {folder}, which has "
                f"{as_flags({name: own[name]})}: leave it out"
            )
    kept = {f.name: getattr(config.model, f.name) for f in dataclasses.fields(config.model)}
    given = {name: value for name, value in kept.items() if value is not None and name != "model"}
    if model.lora is not None and config.model.lora_rank is None:
        for name in LORA:
            given.pop(name, None)
    changes: dict[str, Any] = in_words(model) | given
    if config.data.tokenizer == "bpe" and (found := _tokenizer_in(folder, read_config)) is not None:
        changes["tokenizer"] = found
    return config.replace(**changes)


def model_in(folder: Path, read_config: ReadConfig) -> ModelConfig:
    """The model of a folder of transformers, a run folder or one of its checkpoints.

    Raises:
        UserError: there is none, or our decoder cannot compute it.
    """
    if (folder / HF_CONFIG).is_file():
        from launcher.config.families import read_hf_config

        return read_hf_config(folder / HF_CONFIG)
    if (folder / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"{folder}: is an adapter of PEFT: make a run folder of it with shardscale import, and "
            "give that one"
        )
    run = run_of(folder)
    if run is None:
        what = "holds no config.json and no config.yaml" if folder.is_dir() else "is no folder"
        raise UserError(
            f"{folder}: {what}, give a folder that transformers' save_pretrained has written, or "
            "a run folder"
        )
    fields = read_config(run / _RUN_CONFIG)
    names = {f.name for f in dataclasses.fields(ModelChoice)} & fields.keys()
    return ModelChoice(**{name: fields[name] for name in names}).build()


def in_words(model: ModelConfig) -> dict[str, Any]:
    """A model as fields of RunConfig: a named size that computes the same where there is one, and
    every dimension spelled out."""
    own = model.computes()
    fields = {**own, "window": model.window, "dropout": model.dropout}
    alike = (n for n, m in NAMED.items() if m.computes() == own and m.window == model.window)
    spelled = {name: value for name, value in fields.items() if value is not None}
    masks = {"masks": True} if model.masks else {}
    return {"model": next(alike, CUSTOM), **spelled, **adapter_flags(model.lora), **masks}


def _check_adapters(config: RunConfig, model: ModelConfig) -> None:
    """A run that begins with adapters goes on with the same ones."""
    if model.lora is None or config.model.lora_rank is None:
        return
    own, given = adapter_flags(model.lora), adapter_flags(config.model.build_lora())
    changed = [name for name in CHANGES_ADAPTERS if own[name] != given[name]]
    if changed:
        here, there = (as_flags({name: one[name] for name in changed}) for one in (given, own))
        raise UserError(
            f"{here} differs from --init-from {config.model.init_from}, whose adapters have "
            f"{there}: leave it out, or merge them first with shardscale export --merge"
        )


def run_of(folder: Path) -> Path | None:
    """The run folder of a run folder, or of one of its checkpoints."""
    places = (folder, folder.absolute().parent.parent)
    return next((place for place in places if (place / _RUN_CONFIG).is_file()), None)


def _only_a_limit(name: str, model: ModelConfig) -> bool:
    """Rotary positions have no parameters: how many there are is a limit, not a shape."""
    return name == "context" and model.position == "rope"


def _tokenizer_in(folder: Path, read_config: ReadConfig) -> str | None:
    run = run_of(folder)
    for place in (folder, run):
        if place is not None and (place / _TOKENIZER).is_file():
            return str(place / _TOKENIZER)
    if run is None:
        return None
    named: str | None = read_config(run / _RUN_CONFIG).get("tokenizer")
    return None if named == "bpe" else named
